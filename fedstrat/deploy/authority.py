"""A certificate authority of one's own, and what it issues. All of it in memory: bytes in, bytes out."""

import datetime as dt
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstrat.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPublicKeyTypes

AUTHORITY_DAYS = 3650
SERVER_DAYS = 730
_CLOCK_SKEW = dt.timedelta(days=1)
_PEM = serialization.Encoding.PEM
_PLAIN = serialization.NoEncryption()
_LONGEST_COMMON_NAME = 64


@dataclass(frozen=True)
class Pair:
    """A certificate or public key with its private key, encoded.

    Attributes:
        public: The certificate as PEM, or the public key in OpenSSH's format.
        private: The private key: PKCS #8 as PEM, or OpenSSH's format.
    """

    public: bytes
    private: bytes


class Authority:
    """Issues server certificates; its own certificate is what nodes trust.

    Args:
        pair: Its certificate and private key, as :meth:`make` returned them.

    Raises:
        ConfigError: They can't be read, or don't belong together.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        try:
            self._certificate = x509.load_pem_x509_certificate(pair.public)
            self._key = cast(
                "ec.EllipticCurvePrivateKey", serialization.load_pem_private_key(pair.private, password=None)
            )
        except ValueError as error:
            raise ConfigError(f"the authority's certificate or key can't be read: {error}") from None
        if self._key.public_key() != self._certificate.public_key():
            raise ConfigError("the authority's certificate and key don't belong together")

    @classmethod
    def make(cls, name: str = "fedstrat authority", days: int = AUTHORITY_DAYS) -> Self:
        """Make a new authority, valid for ``days``."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        certificate = (
            _builder(subject, subject, key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(_encode(certificate, key))

    def issue(self, names: Iterable[str], days: int = SERVER_DAYS) -> Pair:
        """Issue a server certificate for these host names and IP addresses.

        Raises:
            ConfigError: A name is neither.
        """
        names = list(dict.fromkeys(names))
        alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(_name(names[0]), self._certificate.subject, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(alternatives, critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return _encode(certificate, key)

    def fault_of(self, pair: Pair, names: Iterable[str], spare_days: int) -> str:
        """Say why a server certificate must be issued anew; "" if it can stay.

        Args:
            pair: The certificate and its key.
            names: Names that it has to be valid for.
            spare_days: Days that it has to be valid for.
        """
        try:
            certificate = x509.load_pem_x509_certificate(pair.public)
            key = cast("ec.EllipticCurvePrivateKey", serialization.load_pem_private_key(pair.private, password=None))
        except ValueError:
            return "it can't be read"
        if key.public_key() != certificate.public_key():
            return "its key is another's"
        if not issued_by(certificate, self._certificate):
            return "another authority issued it"
        held = names_in(pair.public)
        missing = [name for name in names if _plain(name) not in held]
        if missing:
            return f"it isn't valid for {', '.join(missing)}"
        if certificate.not_valid_after_utc - _now() < dt.timedelta(days=spare_days):
            return f"it ends on {certificate.not_valid_after_utc:%Y-%m-%d}"
        return ""


def node_keys(comment: str = "") -> Pair:
    """Make the key pair with which a SuperNode proves who it is: ECDSA on P-384, in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _PLAIN)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return Pair(public + (b" " + comment.encode() if comment else b"") + b"\n", private)


def public_key_of(private: bytes) -> bytes:
    """The public key of a SuperNode's private key, in OpenSSH's format, without a comment.

    Raises:
        ConfigError: It isn't one.
    """
    try:
        key = serialization.load_ssh_private_key(private, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"expected an OpenSSH private key without a passphrase, but: {error}") from None
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def names_in(certificate: bytes) -> list[str]:
    """The host names and addresses that a certificate (PEM or DER) is valid for."""
    read = x509.load_pem_x509_certificate if b"-----BEGIN" in certificate else x509.load_der_x509_certificate
    try:
        found = read(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    hosts = found.get_values_for_type(x509.DNSName)
    return [*hosts, *map(str, found.get_values_for_type(x509.IPAddress))]


def issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether ``authority`` signed ``certificate``."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    public: CertificateIssuerPublicKeyTypes = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _CLOCK_SKEW)  # the clocks of the machines may differ
        .not_valid_after(_now() + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _encode(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, _PLAIN)
    return Pair(certificate.public_bytes(_PEM), private)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:_LONGEST_COMMON_NAME])])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    labels = name.removeprefix("*.").split(".")
    if not name.isascii() or not all(_is_label(label) for label in labels):
        raise ConfigError(
            f"expected a host name or an IP address without a port, such as fl.example.org, but got '{name}'"
        )
    return x509.DNSName(name)


def _plain(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def _is_label(label: str) -> bool:
    return 0 < len(label) < 64 and label.replace("-", "").replace("_", "").isalnum() and label.strip("-") == label


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
