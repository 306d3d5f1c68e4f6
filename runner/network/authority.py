"""An authority of one session: it certifies, for the commands of one workspace, the hosts that get a credential.

Its keys are in the memory of this process only; commands get its certificate, among those that they trust anyway.
"""

from __future__ import annotations

import os
import ssl
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.hazmat.primitives.serialization.pkcs12 import PBES, PKCS12Certificate, serialize_java_truststore
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from runner.core.hosts import is_address
from runner.ports.network import Trust

_STORE_PASSWORD = b"changeit"  # what Java assumes; the store holds certificates only
_ROUNDS = 1000  # of deriving a key from it, which keeps nothing secret
_EARLIER = timedelta(hours=1)  # clocks of virtual machines differ
_VALID = timedelta(days=30)


class Authority:
    def __init__(self, now: datetime) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._from, self._until = now - _EARLIER, now + _VALID
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"runner {os.urandom(8).hex()}")])
        usage = {"key_cert_sign": True, "crl_sign": True, "digital_signature": False, "content_commitment": False}
        usage |= {"key_encipherment": False, "data_encipherment": False, "key_agreement": False}
        self._certificate = (
            self._draft(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**usage, encipher_only=False, decipher_only=False), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def der(self) -> bytes:
        return self._certificate.public_bytes(Encoding.DER)

    def server_context(self, host: str) -> ssl.SSLContext:
        """Return the server's end of TLS for a canonical host. It speaks HTTP/1.1 only."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.IPAddress(ip_address(host)) if is_address(host) else x509.DNSName(host)
        certificate = (
            self._draft(x509.Name([]), key.public_key())
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        chain = certificate.public_bytes(Encoding.PEM)
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        # OpenSSL takes a file only; this one has no name on any disk.
        descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, secret + chain)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return context

    def _draft(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._from)
            .not_valid_after(self._until)
        )


def trust_in(known: Sequence[bytes]) -> Trust:
    """Return certificates in the forms that programs take, given in DER."""
    certificates = [*_readable(known)]
    algorithm = (
        PrivateFormat.PKCS12.encryption_builder()
        .kdf_rounds(_ROUNDS)
        .key_cert_algorithm(PBES.PBESv2SHA256AndAES256CBC)
        .hmac_hash(hashes.SHA256())
        .build(_STORE_PASSWORD)
    )
    store = serialize_java_truststore([PKCS12Certificate(one, None) for one in certificates], algorithm)
    return Trust(b"".join(one.public_bytes(Encoding.PEM) for one in certificates), store)


def _readable(known: Sequence[bytes]) -> Iterator[x509.Certificate]:
    """Read certificates that this host trusts; among those are some that break rules, and may be unreadable one day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)
        for one in known:
            with suppress(ValueError):
                yield x509.load_der_x509_certificate(one)
