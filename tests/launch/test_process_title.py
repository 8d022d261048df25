"""What `ps` shows of a command: no secret that was typed as an argument."""

from __future__ import annotations

import pytest

from shoal.process_title import shown_arguments


@pytest.mark.parametrize(
    "typed",
    [
        "shoal join tcp://h:1 --token S3CRET --key S3CRET --name ann",
        "shoal join tcp://h:1 --token=S3CRET",
        "shoal train a.yaml --set transport.password=S3CRET --transport.password S3CRET --hub.token=S3CRET",
        "shoal serve run --set serving.api_key=S3CRET --serving.api_key S3CRET",
        "shoal join postgresql://ann:S3CRET@h:5432/shoal?pin=00",
        "shoal db grant student ann --password S3CRET",
        "shoal train --set reward={kind:http,key:S3CRET,url:http://u:S3CRET@h/}",
        "shoal train --rlhf.reward.key S3CRET --PASSWORD=S3CRET",
        "shoal db grant student ann --password -S3CRET",
    ],
)
def test_no_secret_that_was_typed_is_shown(typed: str) -> None:
    shown = " ".join(shown_arguments(typed.split()))
    assert "S3CRET" not in shown
    assert len(shown_arguments(typed.split())) == len(typed.split())


def test_everything_else_is_shown() -> None:
    typed = "shoal train a.yaml --token-file f --data.text.tokenizer=own --set x.max_new_tokens=3 http://h:80/v1 --password --resume"
    assert shown_arguments(typed.split()) == typed.split()
