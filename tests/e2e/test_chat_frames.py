"""The chat page against a far end that the test plays, frame by frame: what no real server does on demand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, WebSocketRoute, expect

from tests.e2e.conftest import Visitor
from tests.e2e.site import Site
from tests.factories import Cast

ANSWER = (
    "The sky looks blue because the molecules of the air scatter short waves far more than long ones.\n\n"
    "1. Blue light comes to your eye from every direction.\n2. Red light mostly goes straight on."
)


class FarEnd:
    """The server's side of the newest websocket; it keeps what the page sent."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.sent: list[dict[str, Any]] = []
        self.sockets: list[WebSocketRoute] = []
        page.route_web_socket("**/ws/chat", self._on_connect)

    def _on_connect(self, socket: WebSocketRoute) -> None:
        self.sockets.append(socket)
        socket.on_message(lambda message: self.sent.append(json.loads(message)))

    def say(self, **frame: Any) -> None:
        self.sockets[-1].send(json.dumps(frame))

    def hear(self, kind: str) -> dict[str, Any]:
        """The next frame of that kind."""
        for _ in range(200):
            for frame in self.sent:
                if frame["type"] == kind:
                    self.sent.remove(frame)
                    return frame
            self.page.wait_for_timeout(50)
        raise AssertionError(f"the page sent no {kind}; it sent {self.sent}")

    def begin(self, *, prompt_tokens: int = 20) -> str:
        start = self.hear("start")
        self.say(
            type="started", id=start["id"], request_id="r1", model=start["model"], prompt_tokens=prompt_tokens
        )
        return str(start["id"])

    def answer(self, generation: str, text: str, *, seq: int = 0) -> int:
        for number, word in enumerate(text.split(" ")):
            self.say(type="delta", id=generation, seq=seq + number, text=word + " ", tokens=1)
        return seq + len(text.split(" "))

    def finish(self, generation: str, tokens: int, reason: str = "stop") -> None:
        self.say(
            type="usage",
            id=generation,
            prompt_tokens=20,
            completion_tokens=tokens,
            tokens_per_second=31.4,
            ttft_ms=212,
        )
        self.say(type="done", id=generation, finish_reason=reason)


@pytest.fixture
def visitor(visit: Callable[..., Visitor], cast: Cast) -> Visitor:
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    return visitor


@pytest.fixture
def far_end(visitor: Visitor, cast: Cast) -> FarEnd:
    far_end = FarEnd(visitor.page)
    visitor.page.goto(f"/t/{cast.tenant.public_id}/chat/")
    visitor.page.locator('#connection[data-state="open"]').wait_for()
    return far_end


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def test_an_answer_arrives_with_its_figures(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    ask(page, "Why is the sky blue?")
    visitor.shoot("chat-asked")
    generation = far_end.begin()
    expect(page.get_by_text("Waiting for the first token")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    tokens = far_end.answer(generation, ANSWER)
    far_end.finish(generation, tokens)
    expect(page.get_by_text("31 tokens/s · first token after 212 ms")).to_be_visible()
    expect(page.locator(".turn.assistant [data-text]")).to_contain_text("The sky looks blue")
    expect(page.locator(".turn.assistant li")).to_have_text(
        ["Blue light comes to your eye from every direction.", "Red light mostly goes straight on."]
    )
    expect(page.locator(".turn.assistant")).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    visitor.shoot("chat-answered")


def test_the_whole_conversation_goes_along(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature", exact=True).fill("0")
    page.get_by_label("Seed").fill("7")
    visitor.shoot("chat-settings")
    ask(page, "First")
    generation = far_end.begin()
    far_end.finish(generation, far_end.answer(generation, "One."))
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    ask(page, "Second")
    start = far_end.hear("start")
    assert start["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": "One. "},
        {"role": "user", "content": "Second"},
    ]
    assert start["params"] == {"temperature": 0, "max_tokens": 512, "seed": 7}


def test_what_a_model_or_a_person_writes_is_text(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    hostile = '<img src=x onerror="document.title=1"><script>document.title=2</script><b>bold</b>'
    ask(page, hostile)
    generation = far_end.begin()
    far_end.say(type="delta", id=generation, seq=0, text=hostile, tokens=1)
    far_end.finish(generation, 1)
    expect(page.locator(".turn.assistant [data-text]")).to_have_text(hostile)
    expect(page.locator(".turn.user [data-text]")).to_have_text(hostile)
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.title() == "Chat · Weir"


def test_repeated_frames_change_nothing(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    ask(page, "Go")
    generation = far_end.begin()
    for seq, text in ((0, "a"), (1, "b"), (1, "b"), (0, "a"), (2, "c"), (3, "")):
        far_end.say(type="delta", id=generation, seq=seq, text=text, tokens=1)
    for _ in range(2):  # the text that a stop string held back, once again after a resume
        far_end.say(type="delta", id=generation, seq=4, text="d", tokens=0)
    far_end.finish(generation, 4)
    expect(page.locator(".turn.assistant [data-text]")).to_have_text("abcd")


def test_a_cut_connection_is_shown_and_the_answer_resumed(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    ask(page, "Why is the sky blue?")
    generation = far_end.begin()
    first, rest = ANSWER.split("\n\n")
    seq = far_end.answer(generation, first)
    expect(page.get_by_text("long ones.")).to_be_visible()
    far_end.sockets[-1].close()
    expect(page.get_by_text("The connection was lost; the answer goes on")).to_be_visible()
    visitor.shoot("chat-reconnecting")
    resume = far_end.hear("resume")
    assert (resume["id"], resume["request_id"], resume["from_seq"]) == (generation, "r1", seq)
    far_end.answer(generation, first)  # a server that repeats itself
    far_end.finish(generation, far_end.answer(generation, rest, seq=seq))
    expect(page.get_by_text("31 tokens/s")).to_be_visible()
    text = page.locator(".turn.assistant [data-text]").inner_text()
    assert text.count("The sky looks blue") == 1
    assert text.count("Red light") == 1


def test_a_reload_in_mid_answer_loses_nothing(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    ask(page, "Why is the sky blue?")
    generation = far_end.begin()
    seq = far_end.answer(generation, "The sky looks")
    expect(page.get_by_text("The sky looks")).to_be_visible()
    page.get_by_label("Your message").fill("And at sunset, why is it")
    page.reload()
    expect(page.get_by_label("Your message")).to_have_value("And at sunset, why is it")
    resume = far_end.hear("resume")
    assert (resume["request_id"], resume["from_seq"]) == ("r1", seq)
    far_end.finish(generation, far_end.answer(generation, "blue.", seq=seq))
    expect(page.locator(".turn.assistant [data-text]")).to_have_text("The sky looks blue.")
    expect(page.locator(".turn.user").get_by_text("Why is the sky blue?")).to_be_visible()
    page.keyboard.type(" red?")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user").get_by_text("And at sunset, why is it red?")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Your message")).to_have_value("")


def test_stop_says_so_and_keeps_what_came(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    ask(page, "Go on for ever")
    generation = far_end.begin()
    tokens = far_end.answer(generation, "On and on")
    page.keyboard.press("Escape")
    assert far_end.hear("stop")["id"] == generation
    far_end.finish(generation, tokens, "cancelled")
    expect(page.get_by_text("3 tokens · stopped")).to_be_visible()
    expect(page.get_by_label("Your message")).to_be_focused()


def test_a_quota_hit_is_told_at_its_place_and_can_be_retried(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    ask(page, "Hello")
    start = far_end.hear("start")
    message = "Limit of 60 requests per minute of this tenant reached: this request fits in 12 s."
    error = {"code": "rate_limit_exceeded", "message": message, "type": "requests", "param": None}
    far_end.say(type="error", id=start["id"], error=error, retry_after_ms=2000)
    expect(page.get_by_role("alert").get_by_text(message)).to_be_visible()
    visitor.shoot("chat-quota")
    expect(page.get_by_role("button", name="Retry in")).to_be_disabled()
    page.get_by_role("button", name="Retry", exact=True).click()
    generation = far_end.begin()
    far_end.finish(generation, far_end.answer(generation, "Hello yourself."))
    expect(page.locator(".turn.assistant")).to_have_count(1)
    expect(page.locator(".turn.assistant [data-text]")).to_have_text("Hello yourself.")
    expect(page.get_by_text(message)).to_have_count(0)
    ask(page, "And again")
    start = far_end.hear("start")
    far_end.say(type="error", id=start["id"], error=error, retry_after_ms=70_540_000)
    # A budget that ends tomorrow may be raised today.
    expect(
        page.locator(".turn.assistant").last.get_by_role("button", name="Retry", exact=True)
    ).to_be_enabled()


def test_an_ended_session_asks_to_sign_in(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    far_end.sockets[-1].close(code=4401)
    expect(page.get_by_text("Your session has ended")).to_be_visible()
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    assert len(far_end.sockets) == 1


def test_an_impossible_setting_is_shown_before_anything_is_sent(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature", exact=True).fill("9")
    page.get_by_role("button", name="Settings").click()
    ask(page, "Hello")
    expect(page.get_by_label("Temperature", exact=True)).to_be_focused()
    expect(page.get_by_label("Your message")).to_have_value("Hello")
    assert far_end.sent == []


def test_scrolling_up_is_respected_until_the_reader_returns(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    ask(page, "A long one")
    generation = far_end.begin()
    seq = far_end.answer(generation, "line\n\n" * 80 + "half-way")
    answer = page.locator(".turn.assistant [data-text]")
    log = page.get_by_role("region", name="Conversation")
    to_end = "element => element.scrollHeight - element.clientHeight - element.scrollTop"
    expect(answer).to_contain_text("half-way")
    assert log.evaluate(to_end) < 60
    log.hover()
    page.mouse.wheel(0, -900)
    expect(page.get_by_role("button", name="Latest")).to_be_visible()
    place = log.evaluate("element => element.scrollTop")
    far_end.answer(generation, "more\n\n" * 20 + "the end", seq=seq)
    expect(answer).to_contain_text("the end")
    assert log.evaluate("element => element.scrollTop") == place
    visitor.shoot("chat-scrolled-up")
    page.get_by_role("button", name="Latest").click()
    expect(page.get_by_role("button", name="Latest")).to_be_hidden()
    assert log.evaluate(to_end) < 60


def test_enter_sends_and_shift_enter_does_not(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    box = page.get_by_label("Your message")
    box.fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(box).to_have_value("one\ntwo")
    page.keyboard.press("Enter")
    assert far_end.hear("start")["messages"][-1]["content"] == "one\ntwo"
    expect(box).to_have_value("")


def test_signing_out_leaves_no_conversation_behind(visitor: Visitor, far_end: FarEnd, site: Site):
    page = visitor.page
    ask(page, "A secret question")
    generation = far_end.begin()
    far_end.finish(generation, far_end.answer(generation, "A secret answer"))
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url(site.url + "/")
    assert "secret" not in page.evaluate("JSON.stringify(sessionStorage)")
