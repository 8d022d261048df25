"""Ed25519: the test vectors of RFC 8032, and signatures that must be refused."""

from __future__ import annotations

import pytest

from shoal.protocol.identities import Identity, is_proved, is_signed, public_key, sign

VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]
ORDER = 2**252 + 27742317777372353535851937790883648493


@pytest.mark.parametrize(("secret", "public", "text", "signature"), [tuple(map(bytes.fromhex, vector)) for vector in VECTORS])
def test_the_vectors_of_the_standard(secret: bytes, public: bytes, text: bytes, signature: bytes) -> None:
    assert public_key(secret) == public
    assert sign(secret, text) == signature
    assert is_signed(public, text, signature)
    assert not is_signed(public, text + b".", signature)
    assert not is_signed(public, text, signature[:-1] + bytes([signature[-1] ^ 1]))
    beyond = int.from_bytes(signature[32:], "little") + ORDER
    assert not is_signed(public, text, signature[:32] + beyond.to_bytes(32, "little")), "a signature has one form"


def test_keys_that_fit_what_nobody_signed_are_refused() -> None:
    order_8 = bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05")
    for key in (
        b"\1" + bytes(31),
        bytes(32),
        b"\xec" + b"\xff" * 30 + b"\x7f",
        b"\xff" * 32,
        b"short",
        order_8,
        b"\1" + bytes(30) + b"\x80",
    ):
        assert not is_signed(key, b"text", b"\1" + bytes(63))


def test_a_proof_is_for_one_purpose_one_name_and_one_question() -> None:
    identity = Identity.new()
    proof = identity.prove("join", "ada", "nonce")
    assert is_proved(identity.key, "join", "ada", "nonce", proof)
    for other in (("gone", "ada", "nonce"), ("join", "bob", "nonce"), ("join", "ada", "later")):
        assert not is_proved(identity.key, *other, proof)
