"""A self-signed certificate for one address."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.servers import packages


def make(certificate: Path, key: Path, host: str) -> None:
    """Write the key and the certificate unless they exist; the certificate is its own authority."""
    if certificate.exists():
        return
    packages.ensure(["tls"])
    openssl = packages.find("tls", "openssl")
    settings = certificate.with_name("openssl.cnf")
    settings.write_text(
        "[req]\ndistinguished_name = name\nx509_extensions = more\nprompt = no\n[name]\nCN = test\n"
        f"[more]\nsubjectAltName = IP:{host}\nbasicConstraints = critical,CA:TRUE\n"
    )
    subprocess.run(
        [str(openssl.path), "req", "-x509", "-config", str(settings), "-newkey", "ec",
         "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(certificate)],
        env={"PATH": os.defpath, **openssl.environment()}, check=True, capture_output=True,
    )  # fmt: skip
    key.chmod(0o600)
