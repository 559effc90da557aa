"""What a context and a generation server are asked, and what is made of the first one's answer."""

from __future__ import annotations

from typing import Any

import pytest

from mpillm.cores.openai_client.disagg_protocol import DisaggregatedParams, KvTransferParams, protocol_of

REQUEST = {"prompt": [1, 2], "max_tokens": 8, "min_tokens": 4, "seed": 7}


def answer(reason: str = "length", params: Any = None, of_choice: Any = None) -> dict[str, Any]:
    choice = {"finish_reason": reason, "disaggregated_params": of_choice}
    return {"choices": [choice], "kv_transfer_params": params}


def test_kv_transfer_params() -> None:
    protocol = protocol_of("kv_transfer_params", 0)
    assert isinstance(protocol, KvTransferParams)
    body = protocol.for_context(REQUEST)
    assert (body["max_tokens"], body["min_tokens"], body["seed"]) == (1, 1, 7)
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    assert body["kv_transfer_params"]["remote_block_ids"] is None
    handed = {"do_remote_prefill": True, "remote_block_ids": [[3]]}
    assert (
        protocol.handoff_params(answer(params=handed)) == handed
        and protocol.handoff_params(answer("stop")) is None
    )
    assert protocol.for_generation(REQUEST, handed) == REQUEST | {"kv_transfer_params": handed}
    with pytest.raises(ValueError, match="its kv_transfer_params are not an object"):
        protocol.handoff_params(answer(params=[1]))


def test_disaggregated_params() -> None:
    protocols = [
        protocol
        for client in (0, 1)
        if isinstance(protocol := protocol_of("disaggregated_params", client), DisaggregatedParams)
    ]
    assert len(protocols) == 2
    bodies = [protocol.for_context(REQUEST) for protocol in (*protocols, *protocols)]
    ids = [one["disaggregated_params"]["disagg_request_id"] for one in bodies]
    assert len(set(ids)) == 4 and min(ids) >= 1 << 42
    assert (
        bodies[0]["max_tokens"] == 8 and bodies[0]["disaggregated_params"]["request_type"] == "context_only"
    )
    (protocol, _) = protocols
    params = {"request_type": "context_only", "first_gen_tokens": [5]}
    handed = protocol.handoff_params(answer("not_finished", of_choice=params))
    assert handed == params | {"request_type": "generation_only"}
    assert protocol.handoff_params(answer("stop", of_choice=params)) is None, "the first token was the last"
    assert protocol.for_generation(REQUEST, handed)["disaggregated_params"] == handed
