"""Real servers for the tests and the benchmarks: started on free loopback ports, stopped with all they left behind.

    from tests.engines import Proxy, Redis

    with Redis() as redis, Proxy(redis) as proxy:
        ...

In pytest, ask for the fixtures of `tests.engines.plugin`.
"""

from tests.engines.cluster import Cluster
from tests.engines.etcd import Etcd, EtcdCluster
from tests.engines.mariadb import MariaDB
from tests.engines.packages import EngineMissing
from tests.engines.pgbouncer import PgBouncer
from tests.engines.postgres import Postgres
from tests.engines.proxy import Proxies, Proxy
from tests.engines.redis import Redis, RedisNodes
from tests.engines.server import Server, StartFailed
from tests.engines.zookeeper import ZooKeeper, ZooKeeperCluster

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
