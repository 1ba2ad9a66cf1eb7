"""etcd: one member, or a cluster of them."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.servers import certificate, packages
from tests.servers.cluster import Cluster
from tests.servers.server import Server
from tests.support.waiting import eventually_blocking


class Etcd(Server):
    """One etcd member. It syncs every write to disk, as in production, because the tests also check durability."""

    family = "etcd"
    ports_needed = 2
    # A leader first tries to hand over its role; if all members stop together, this takes seven seconds.
    stop_limit = 2.0

    name = "m0"
    cluster: EtcdCluster | None = None
    _must_join = False
    _state = "new"

    def url_at(self, address: str) -> str:
        return f"etcd://{address}"

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float = 5.0, token: str = ""
    ) -> dict[str, Any]:
        """Send a request to etcd's JSON gateway (`/v3/…` with a body) or read another path; `token` is that of a login."""
        connection = self._connect(timeout)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"Authorization": token} if token else {})
            response = connection.getresponse()
            text = response.read().decode()
            if response.status != 200:
                raise ConnectionError(f"etcd answered {response.status} to {path}: {text.strip()}")
            answer: dict[str, Any] = json.loads(text)
            return answer
        finally:
            connection.close()

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def put(self, key: str, value: str, *, timeout: float = 5.0) -> None:
        """Write one key."""
        self.call("/v3/kv/put", {"key": _pack(key), "value": _pack(value)}, timeout=timeout)

    def get(self, key: str, *, timeout: float = 5.0) -> str | None:
        """Read one key, linearizably."""
        found = self.call("/v3/kv/range", {"key": _pack(key)}, timeout=timeout).get("kvs", [])
        return base64.b64decode(found[0].get("value", "")).decode() if found else None

    @property
    def peer_url(self) -> str:
        """The URL of this member for the other members."""
        return f"http://{self.host}:{self.ports[1]}" if self.port else ""

    def wipe(self) -> None:
        super().wipe()
        # A member of a running cluster must not return under the same identity without its data: it could vote twice.
        # It has to leave the cluster and join again.
        self._must_join = self.cluster is not None and any(member.is_alive for member in self.cluster.members)
        self._state = "existing" if self._must_join else "new"

    def _prepare(self) -> None:
        if self._must_join and self.cluster is not None:
            self.cluster.replace(self)
            self._must_join = False

    def _command(self) -> tuple[list[str], packages.Program]:
        program = packages.find(self.family, "etcd")
        members = self.cluster.members if self.cluster is not None else (self,)
        options = {
            "name": self.name,
            "data-dir": str(self.data),
            "listen-client-urls": f"http://{self.address}",
            "advertise-client-urls": f"http://{self.address}",
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": ",".join(f"{member.name}={member.peer_url}" for member in members),
            "initial-cluster-token": self.cluster.token if self.cluster is not None else uuid.uuid4().hex,
            "initial-cluster-state": self._state,
            # Without it, a member that was paused would force an election when it is resumed, although there is a leader.
            "pre-vote": "true",
            # With it, a member could be replaced only after the others were connected for five seconds.
            "strict-reconfig-check": "false",
            # This allows leases of one second: etcd's minimum is one and a half election timeouts, rounded up.
            "heartbeat-interval": "50",
            "election-timeout": "500",
            "logger": "zap",
            **self.settings,
        }
        return [str(program.path), *(f"--{name}={value}" for name, value in options.items())], program

    def _probe(self, timeout: float) -> None:
        health = self.call("/health", timeout=timeout)
        if health.get("health") != "true":
            raise ConnectionError(f"etcd is not healthy: {health}")


class EtcdTls(Etcd):
    """One member with TLS for its clients; if `mutual`, it requires their certificate."""

    def __init__(self, *, mutual: bool = False, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings=settings)
        self.mutual = mutual

    @property
    def certificate(self) -> Path:
        """The server's certificate: its own authority, and also the one that a client presents if `mutual`."""
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        """The private key of the certificate."""
        return self.folder / "key.pem"

    def url_at(self, address: str) -> str:
        return f"etcds://{address}"

    def _prepare(self) -> None:
        super()._prepare()
        certificate.make(self.certificate, self.key, self.host)
        self.settings |= {
            "listen-client-urls": f"https://{self.address}",
            "advertise-client-urls": f"https://{self.address}",
            "cert-file": str(self.certificate),
            "key-file": str(self.key),
        }
        if self.mutual:
            self.settings |= {"client-cert-auth": "true", "trusted-ca-file": str(self.certificate)}

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.load_cert_chain(self.certificate, self.key)
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=context)


class EtcdCluster(Cluster[Etcd]):
    """Members that elect a leader; a minority of them may be down."""

    def __init__(self, count: int = 3, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__([Etcd(settings=settings) for _ in range(count)])
        self.token = uuid.uuid4().hex
        for number, member in enumerate(self.members):
            member.name = f"m{number}"
            member.cluster = self

    def wipe(self) -> None:
        super().wipe()
        self.token = uuid.uuid4().hex

    def replace(self, newcomer: Etcd) -> None:
        """Remove a member that lost its data from the cluster, and add it as a new one."""
        others = [member for member in self.members if member is not newcomer]
        eventually_blocking(
            lambda: any(member.answers(1.0) for member in others), f"a majority lets {newcomer!r}, wiped, join again"
        )
        helper = next(member for member in others if member.answers(1.0))
        listed = helper.call("/v3/cluster/member/list", {})["members"]
        for entry in listed:
            if newcomer.peer_url in entry["peerURLs"]:
                helper.call("/v3/cluster/member/remove", {"ID": entry["ID"]})
        helper.call("/v3/cluster/member/add", {"peerURLs": [newcomer.peer_url]})

    def _leads(self, member: Etcd) -> bool:
        try:
            status = member.call("/v3/maintenance/status", {}, timeout=1.0)
        except (OSError, http.client.HTTPException):
            return False
        return bool(status.get("leader") == status["header"]["member_id"])


def _pack(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
