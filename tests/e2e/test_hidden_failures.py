"""Unreadable pictures through real processes: a zmq_to_scheduler language server never hears of them."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from fullhit.http.encoder.substitute import unreadable_png
from fullhit.lab.embedding import mock_embedding
from fullhit.lab.images import data_uri
from fullhit.lab.language_server import LanguageServerSettings, MockLanguageServer, RequestFailed
from fullhit.lab.processes import fetch_json, free_port


def cut_off(picture: str) -> str:
    """A JPEG that ends in the middle of its pixels: its header is fine."""
    content = base64.b64decode(picture.partition(",")[2])
    return data_uri(content[: len(content) * 2 // 3])


@pytest.mark.parametrize("aliases", [0, 4])
async def test_pictures_which_only_the_encoder_finds_unreadable_cost_nobody_else_anything(
    deployment: Any, pictures: list[str], aliases: int
) -> None:
    await deployment.start_router()
    urls = [(await deployment.start_encoder())[1] for _ in range(2)]
    await deployment.ready(*urls)
    targets = tuple(f"{deployment.base}/v{n}" for n in range(aliases)) or (deployment.base,)
    unreachable = f"http://127.0.0.1:{free_port()}/none.png"
    substitute = mock_embedding(unreadable_png(), 64)
    async with MockLanguageServer(LanguageServerSettings(targets, tp_size=2), seed=1) as server:
        good = await server.encode(pictures[:2])
        for bad in (unreachable, cut_off(pictures[3])):
            one, several = await asyncio.gather(
                server.encode([bad]), server.encode([pictures[0], bad, pictures[1]] if aliases else [bad, bad])
            )
            assert one.embedding == substitute
            whole = good.embedding[: len(substitute)] + substitute + good.embedding[len(substitute) :]
            assert several.embedding == (whole if aliases else 2 * substitute)
        assert server.stats.failed == 0
    errors = [(await fetch_json(f"{url}/mock/stats"))["error_parts"] for url in urls]
    assert errors == [0, 0], "no error was pushed to anybody"
    await deployment.idle()


async def test_with_pass_the_same_picture_stops_a_language_server(deployment: Any, pictures: list[str]) -> None:
    await deployment.start_router("--bad-image", "pass")
    _, url = await deployment.start_encoder()
    await deployment.ready(url)
    async with MockLanguageServer(LanguageServerSettings((deployment.base,)), seed=1) as server:
        with pytest.raises(RequestFailed) as failure:
            await server.encode([cut_off(pictures[3])])
    assert failure.value.would_stop_server
    assert failure.value.status == 400
    await deployment.idle()
