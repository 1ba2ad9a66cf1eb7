"""ZooKeeper with a port for TLS."""

from __future__ import annotations

import os
import subprocess
from glob import glob
from pathlib import Path

from tests.servers import packages
from tests.servers.zookeeper import ZooKeeper

PASSWORD = "changeit"  # Java's key stores need a password


class ZooKeeperTls(ZooKeeper):
    """One ZooKeeper server that also listens on a port for TLS, with a self-signed certificate."""

    ports_needed = 4

    @property
    def certificate(self) -> Path:
        """The certificate that a client has to trust."""
        return self.folder / "certificate.pem"

    @property
    def tls_url(self) -> str:
        """The URL for the port with TLS, up to its chroot."""
        return f"zookeepers://{self.host}:{self.ports[3]}"

    def _listening_ports(self) -> tuple[int, ...]:
        return (self.ports[0], self.ports[3])

    def _prepare(self) -> None:
        store = self.folder / "key.p12"
        if not store.exists():
            self._keytool(
                "-genkeypair", "-alias", "server", "-keyalg", "EC", "-groupname", "secp256r1", "-dname", "CN=test",
                "-ext", f"san=ip:{self.host}", "-validity", "2", "-storetype", "PKCS12", "-keystore", str(store),
                "-storepass", PASSWORD,
            )  # fmt: skip
            self._keytool(
                "-exportcert", "-rfc", "-alias", "server", "-keystore", str(store), "-storepass", PASSWORD,
                "-file", str(self.certificate),
            )  # fmt: skip
        self.settings |= {
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "secureClientPort": str(self.ports[3]),
            "secureClientPortAddress": self.host,
            "ssl.keyStore.location": str(store),
            "ssl.keyStore.password": PASSWORD,
            "ssl.trustStore.location": str(self.certificate),
            "ssl.clientAuth": "none",
        }
        super()._prepare()

    def _command(self) -> tuple[list[str], packages.Program]:
        command, java = super()._command()
        place = command.index("-cp") + 1
        folder = packages.find(self.family, "zookeeper.jar").path.parent
        command[place] = os.pathsep.join([command[place], *sorted(glob(str(folder / "netty-*.jar")))])
        return command, java

    def _keytool(self, *arguments: str) -> None:
        java = packages.find(self.family, "java")
        environment = {"PATH": os.defpath, **java.environment()}
        keytool = str(java.path.parent / "keytool")
        subprocess.run([keytool, *arguments], env=environment, check=True, capture_output=True)
