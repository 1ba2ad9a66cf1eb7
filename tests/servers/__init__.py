"""Real servers for the tests and the benchmarks: started on free loopback ports, stopped with all they left behind.

    from tests.servers import Proxy, Redis

    with Redis() as redis, Proxy(redis) as proxy:
        ...

In pytest, ask for the fixtures of `tests.servers.plugin`.
"""

from tests.servers.cluster import Cluster
from tests.servers.etcd import Etcd, EtcdCluster
from tests.servers.mariadb import MariaDB
from tests.servers.packages import EngineMissing
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import Postgres
from tests.servers.proxy import Proxies, Proxy
from tests.servers.redis import Redis, RedisNodes
from tests.servers.server import Server, StartFailed
from tests.servers.zookeeper import ZooKeeper, ZooKeeperCluster

__all__ = [
    "Cluster",
    "EngineMissing",
    "Etcd",
    "EtcdCluster",
    "MariaDB",
    "PgBouncer",
    "Postgres",
    "Proxies",
    "Proxy",
    "Redis",
    "RedisNodes",
    "Server",
    "StartFailed",
    "ZooKeeper",
    "ZooKeeperCluster",
]
