"""TLS for the API on TCP. Owns what is accepted: TLS 1.2 and newer, with the certificate that the
configuration names.
"""

from __future__ import annotations

import ssl

from oobleckd.daemon.config import Config
from oobleckd.host.settings import ConfigError


def context_of(config: Config) -> ssl.SSLContext:
    """For the server's side. Raises ConfigError where the files are no certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "tls_cert",
            f"{config.tls_cert} and {config.tls_key} cannot be used: {error}",
            "name a PEM certificate chain, and its key",
        ) from error
    return context
