"""The protocol with a clock, to show that the model without a clock contains every step that clocks allow.

One node is enough: time decides only when a node's hold expires, and until when a client counts replies and trusts its
lease. Each step with clocks must be a step of `Model`; a step that is missing there is returned as a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.redlock.protocol import LOOSE, Client, Clients, Event, Model, Node

TTL = 2  # in ticks, without the clock margin


class Timed(NamedTuple):
    """A state of the model, with the times that the model leaves out."""

    clients: Clients
    node: Node
    sent: tuple[tuple[int, ...], ...]  # for each client, when it sent the rounds of its current attempt
    answered: tuple[int, ...]  # and the latest of them that was acknowledged
    expires: int = 0
    now: int = 0


class Gap(Exception):
    """A step that clocks allow and the model does not."""

    def __init__(self, event: Event, state: Timed) -> None:
        super().__init__(f"the model has no {event} in {state}")
        self.event = event


class Clocks:
    """Steps with clocks; `late` is how long a faulty client trusts its lease beyond the deadline."""

    def __init__(self, model: Model, until: int, late: int = 0) -> None:
        self.model = model
        self.until = until
        self.late = late

    def start(self) -> Timed:
        clients, (node,) = self.model.start()
        return Timed(clients, node, ((),) * len(clients), (LOOSE,) * len(clients))

    def over(self, state: Timed, owner: int, round: int) -> bool:
        """Return whether the deadline of a round has passed."""
        sent = state.sent[owner]
        return round < len(sent) and state.now >= sent[round] + TTL + self.late

    def steps(self, state: Timed) -> Iterator[Timed]:
        """Yield the next states; raise Gap if a step is not in the model."""
        if state.now < self.until:
            yield self.tick(state)
        for owner, client in enumerate(state.clients):
            yield from self.messages(state, owner, client)
            if client.attempt < self.model.instance.attempts:
                yield from self.client(state, owner, client)
        if not state.node.free and state.now >= state.expires:
            yield self.arrive(state, Event("expire", state.node.holder))

    def tick(self, state: Timed) -> Timed:
        """Advance the time; a client past its deadline ends its attempt, or waits for replies to a later round."""
        state = state._replace(now=state.now + 1)
        for owner in range(len(state.clients)):
            while self.over(state, owner, state.clients[owner].round):
                client = state.clients[owner]
                last = client.believes or client.round + 1 == self.model.instance.rounds
                state = self.move(state, "end" if last else "wait", owner, 0 if last else client.round)
        return state

    def messages(self, state: Timed, owner: int, client: Client) -> Iterator[Timed]:
        """Deliver a message of this client's current attempt, or a late one."""
        first = owner * self.model.instance.attempts
        for attempt in range(first, first + client.attempt):
            yield self.arrive(state, Event("claim", attempt, LOOSE))
            yield self.arrive(state, Event("undo", attempt))
        for round in range(len(state.sent[owner])):
            event = Event("claim", first + client.attempt, round if round >= client.round else LOOSE)
            after = self.arrive(state, event)
            if after.node.holder == event.attempt:
                answered = (*state.answered[:owner], max(state.answered[owner], round), *state.answered[owner + 1 :])
                yield after._replace(answered=answered)
        for k in range(self.model.instance.attempts):
            if client.granted >> k & 1:
                yield self.arrive(state, Event("heal", first + k))

    def client(self, state: Timed, owner: int, client: Client) -> Iterator[Timed]:
        """The client sends a round, counts its replies before the deadline, or ends its attempt."""
        sent = state.sent[owner]
        if len(sent) < self.model.instance.rounds:
            yield state._replace(sent=(*state.sent[:owner], (*sent, state.now), *state.sent[owner + 1 :]))
        for round in range(client.round + client.believes, len(sent)):
            if not self.over(state, owner, round) and state.answered[owner] >= round:
                yield self.move(state, "renew" if client.believes else "grant", owner, round)
        yield self.move(state, "end", owner)

    def arrive(self, state: Timed, event: Event) -> Timed:
        """Take the model's step on the node; a hold that is made or confirmed counts its ttl from now."""
        steps = dict(self.model.node_steps(state.node, state.clients))
        if event not in steps:
            raise Gap(event, state)
        node = self.model.simplified(steps[event], state.clients, state.clients)
        confirmed = event.what == "claim" and node.holder == event.attempt
        if confirmed or node.holder not in (state.node.holder, LOOSE):
            state = state._replace(expires=state.now + TTL)
        return state._replace(node=node)

    def move(self, state: Timed, what: str, owner: int, number: int = 0) -> Timed:
        """Take the model's step of a client."""
        event = Event(what, owner * self.model.instance.attempts + state.clients[owner].attempt, number)
        for move in self.model.client_moves(state.clients):
            if move.event == event and (not move.quorum or self.model.votes(state.node, event)):
                node = self.model.simplified(state.node, state.clients, move.clients)
                state = state._replace(clients=move.clients, node=node)
                if what == "end":
                    sent = (*state.sent[:owner], (), *state.sent[owner + 1 :])
                    answered = (*state.answered[:owner], LOOSE, *state.answered[owner + 1 :])
                    state = state._replace(sent=sent, answered=answered)
                return state
        raise Gap(event, state)


def gap(clocks: Clocks) -> tuple[int, Gap | None]:
    """Return the number of states with clocks, and the first step that the model lacks, if any."""
    start = clocks.start()
    states, todo = {start}, [start]
    try:
        while todo:
            for state in clocks.steps(todo.pop()):
                if state not in states:
                    states.add(state)
                    todo.append(state)
    except Gap as found:
        return len(states), found
    return len(states), None
