"""Certificates: any change is refused, wherever it is made; a signature identifies the author."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd.cli.main import main
from autoptd.errors import AutoptdError, PlanFileError, SigningError
from autoptd.parallel import Parallel
from autoptd.plans.certificate import program_digest, versions
from autoptd.plans.data import Certificate, Signature
from autoptd.plans.model import Plan
from autoptd.plans.signing import check_signature, private_key, sign

from .hostile_models import KINDS, LENGTH, WIDTH, harmless, model_of

NAMES = {kind: harmless(kind) for kind in KINDS}
OTHER = "sha256:" + "0" * 64


@cache
def source() -> autoptd.TracedModel:
    inputs = {NAMES["input"]: torch.ones(2, LENGTH, WIDTH, device="meta")}
    return autoptd.trace(model_of(NAMES), inputs=inputs, precision="fp32")


def parallel(plan: Plan | None = None, **options: Any) -> Parallel:
    if plan is None:
        options |= {"world": 2, "batch": 4, "fix": {"tp": 2}, "cluster": "dgx-h100"}
    return autoptd.parallelize(source(), plan=plan, **options)


@cache
def verified() -> Plan:
    """Return a plan with a valid certificate."""
    made = parallel()
    certificate = Certificate(
        plan=made.plan.digest,
        graph=made.plan.graph_hash,
        program=program_digest(made.program),
        versions=versions(),
        ranks=2,
        difference=0.0,
    )
    return made.plan.model_copy(update={"certificate": certificate})


def changed(**fields: Any) -> Plan:
    held = verified().certificate
    assert held is not None
    return verified().model_copy(update={"certificate": held.model_copy(update=fields)})


def test_a_certificate_says_what_it_proves():
    data = json.loads(verified().to_json())["certificate"]
    assert "found no difference" in data["proves"]
    assert "anybody who can write this file can write a certificate" in data["proves"]
    assert "signature" not in data
    assert Plan.from_json(verified().to_json()) == verified()
    del data["proves"]  # as in an earlier version
    older = json.loads(verified().to_json()) | {"certificate": data}
    assert Plan.from_json(json.dumps(older)) == verified()


@pytest.mark.parametrize("field", ["plan", "graph", "program"])
def test_a_digest_that_differs_is_refused(field: str, tmp_path: Path):
    with pytest.raises(PlanFileError, match=r"changed after it was verified|another program") as caught:
        parallel(changed(**{field: OTHER})).emit(tmp_path / "out")
    assert caught.value.where == f"certificate.{field}"
    assert OTHER in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_program_of_other_versions_says_so():
    with pytest.raises(PlanFileError, match=r"another program .* it was verified with autoptd 0\.0, this is"):
        parallel(changed(program=OTHER, versions={"autoptd": "0.0"}))


@pytest.mark.parametrize("proves", ["that all is well", "", None, "signed by the owner", "x\ny"], ids=repr)
def test_what_it_proves_is_no_free_text(proves: Any):
    data = json.loads(verified().to_json())
    data["certificate"]["proves"] = proves
    with pytest.raises(PlanFileError, match="mistake"):
        Plan.from_json(json.dumps(data))


# --- keys ---------------------------------------------------------------------------------------------------------

Keys = tuple[Path, Path]


@pytest.fixture
def keys(tmp_path: Path) -> Callable[[str], Keys]:
    """Return a function that writes the files of a private and a public key."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    def make(name: str) -> Keys:
        key = Ed25519PrivateKey.generate()
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
        public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
        return private, public

    return make


def signed(private: Path, plan: Plan | None = None) -> Plan:
    plan = plan or verified()
    assert plan.certificate is not None
    return plan.model_copy(update={"certificate": sign(plan.certificate, private_key(private))})


def test_a_signed_plan_is_run_and_read_back(keys: Callable[[str], Keys], tmp_path: Path):
    private, public = keys("mine")
    plan = signed(private)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.digest == verified().digest
    out = parallel(again, signed_by=public).emit(tmp_path / "out")
    assert Plan.load(out / "plan.json") == plan
    parallel(again)  # without a key, signatures are not checked


@pytest.mark.parametrize(
    "fields",
    [
        {"plan": OTHER},
        {"graph": OTHER},
        {"program": OTHER},
        {"versions": {"autoptd": "9", "torch": "9"}},
        {"ranks": 4096},
        {"shown": ("all of it",)},
        {"difference": 1.0},
        {"signature": None},
        {"signature": Signature(by="0" * 64, value="0" * 128)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_certificate_that_was_changed_after_it_was_signed_is_refused(fields: Any, keys: Callable[[str], Keys]):
    private, public = keys("mine")
    certificate = signed(private).certificate
    assert certificate is not None
    check_signature(certificate, public)
    with pytest.raises(PlanFileError, match=r"not signed by|without a signature") as caught:
        check_signature(certificate.model_copy(update=fields), public)
    assert caught.value.fix


def test_another_s_signature_and_none_are_refused(keys: Callable[[str], Keys]):
    (mine, public), (theirs, _) = keys("mine"), keys("theirs")
    forged = signed(theirs)
    assert forged.certificate is not None and forged.certificate.signature is not None
    own = signed(mine).certificate
    assert own is not None and own.signature is not None
    claimed = forged.certificate.signature.model_copy(update={"by": own.signature.by})
    for plan, what in (
        (forged, "not signed by"),
        (forged.model_copy(update={"certificate": own.model_copy(update={"signature": claimed})}), "not signed by"),
        (verified(), "a certificate without a signature"),
        (verified().model_copy(update={"certificate": None}), "the plan has no certificate"),
    ):
        with pytest.raises(PlanFileError, match=what):
            parallel(plan, signed_by=public)
    with pytest.raises(PlanFileError, match="the plan has no certificate"):
        parallel(signed_by=public)  # a plan that was just searched has no certificate


def test_a_signature_of_one_plan_is_none_of_another(keys: Callable[[str], Keys]):
    private, public = keys("mine")
    other = signed(private).model_copy(update={"notes": ("rm -rf",)})
    with pytest.raises(PlanFileError, match="changed after it was verified"):
        parallel(other, signed_by=public)


def encrypted(path: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    form = s.BestAvailableEncryption(b"secret")
    return Ed25519PrivateKey.generate().private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, form)


def of_another_kind(path: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    return generate_private_key(SECP256R1()).private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


BAD_KEYS: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda path: b"",
    "text": lambda path: b"ssh-ed25519 AAAA me\n",
    "bytes": lambda path: b"\xff\x00\xfe",
    "cut short": lambda path: path.read_bytes()[:60],
    "the public one": lambda path: path.with_suffix(".pub").read_bytes(),
    "with a password": encrypted,
    "of another kind": of_another_kind,
}


@pytest.mark.parametrize("bad", BAD_KEYS.values(), ids=BAD_KEYS)
def test_a_bad_key_is_one_error(bad: Callable[[Path], bytes], keys: Callable[[str], Keys], tmp_path: Path):
    path = tmp_path / "bad.pem"
    path.write_bytes(bad(keys("mine")[0]))
    with pytest.raises(SigningError) as caught:
        private_key(path)
    assert str(path) in caught.value.where
    assert caught.value.fix
    if bad is not BAD_KEYS["the public one"]:
        with pytest.raises(SigningError):
            check_signature(verified().certificate, path)


def test_commands_check_keys_before_they_run(keys: Callable[[str], Keys], tmp_path: Path, capsys: Any):
    (private, public), plan = keys("mine"), tmp_path / "plan.json"
    signed(private).save(plan)
    kept = plan.read_text()
    assert main(["verify", str(plan), "--signed-by", str(public)]) == 0
    assert "is signed by" in capsys.readouterr().out
    for arguments in (
        ["verify", str(plan), "--signed-by", str(private)],
        ["verify", str(plan), "--signed-by", str(keys("theirs")[1])],
        ["verify", str(plan), "--sign", str(public), "--model", "nowhere"],
        ["verify", str(plan), "--sign", str(tmp_path / "missing"), "--model", "nowhere"],
        ["verify", str(plan), "--sign", str(private), "--signed-by", str(public)],
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.count("autoptd:") == 1
        assert "Traceback" not in said
        assert "nowhere" not in said
    assert plan.read_text() == kept


def test_without_the_package_there_is_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for run in (lambda: private_key(tmp_path / "key.pem"), lambda: check_signature(None, tmp_path / "key.pub")):
        with pytest.raises(AutoptdError, match="cryptography, which is not installed") as caught:
            run()
        assert caught.value.fix == "pip install 'autoptd[sign]'"
