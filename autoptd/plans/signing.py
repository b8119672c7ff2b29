"""Signatures of certificates, which prove who made them: ed25519, by the package `cryptography`.

    openssl genpkey -algorithm ed25519 -out key.pem       # the private key, for `autoptd verify PLAN --sign key.pem`
    openssl pkey -in key.pem -pubout -out public.pem      # the public one, for `--signed-by public.pem`

The signed text is the certificate without the signature; it includes the digests of plan, graph and program.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoptd.cost_models.complaints import read_text
from autoptd.errors import PlanFileError, SigningError
from autoptd.plans.data import Certificate, Signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MAKE = "make one: openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out public.pem"


def private_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key from a PEM file without a password. Raises SigningError."""
    key: Ed25519PrivateKey = _read(path, "private")
    return key


def sign(certificate: Certificate, key: Ed25519PrivateKey) -> Certificate:
    value = key.sign(certificate.signed_text().encode()).hex()
    by = key.public_key().public_bytes_raw().hex()
    return certificate.model_copy(update={"signature": Signature(by=by, value=value)})


def check_signature(certificate: Certificate | None, key: Path) -> None:
    """Raise PlanFileError unless the holder of a public key signed the certificate, SigningError for a bad key file."""
    public = _read(key, "public")
    held = None if certificate is None else certificate.signature
    if certificate is None or held is None:
        what = "no certificate" if certificate is None else "a certificate without a signature"
        raise PlanFileError(
            f"the plan has {what}, but one signed by {key} is required",
            where="certificate",
            fix="verify and sign it (autoptd verify PLAN --sign KEY)",
        )
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(bytes.fromhex(held.value), certificate.signed_text().encode())
    except InvalidSignature:
        raise PlanFileError(
            f"the plan's certificate is not signed by {key}, or was changed after it was signed",
            where="certificate.signature",
            fix="verify and sign it again (autoptd verify PLAN --sign KEY), or pass the right public key",
        ) from None


def _read(path: Path, kind: str) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise SigningError(
            "signatures need the package cryptography, which is not installed",
            where=str(path),
            fix="pip install 'autoptd[sign]'",
        ) from None
    text = read_text(path, f"{kind} key", SigningError, _MAKE).encode()
    try:
        if kind == "private":
            key: Any = serialization.load_pem_private_key(text, password=None)
        else:
            key = serialization.load_pem_public_key(text)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: a password is needed
        what = str(error).strip().splitlines()
        raise SigningError(
            f"{path} holds no {kind} key in PEM format without a password" + (f": {what[0][:200]}" if what else ""),
            where=str(path),
            fix=_MAKE,
        ) from None
    if not isinstance(key, (ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey)):
        raise SigningError(f"{path} holds a key that is not ed25519", where=str(path), fix=_MAKE)
    return key
