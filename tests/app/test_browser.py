"""The explorer in a real Chromium, on a wide and a narrow screen: every page opens without an error, and a link reopens
what it shows."""

import csv
import os
import re
import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import TimeoutError as Slow
from playwright.sync_api import expect, sync_playwright

from etude.explorer import PAGES
from tests.app.serving import NO_BROWSER, find_browser, served
from tests.app.test_any_run import locked, trained

WIDTHS = (1200, 390)
CHART = '[data-testid="stVegaLiteChart"]'
SLOW = 60_000
"""Milliseconds that anything may take at most."""
expect.set_options(timeout=SLOW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("explorer")


@pytest.fixture(scope="module")
def address(folder):
    """The explorer as `etude explore` starts it, where no run lies: pages show the committed examples."""
    with served(folder) as found:
        yield found
    # A click on a download while the page is drawn anew asks Streamlit for a file that has just gone; the test clicks
    # again.
    said = re.sub(
        r"Error executing deferred callable.*?Deferred file \w+ not found\n",
        "",
        (folder / "log").read_text(),
        flags=re.DOTALL,
    )
    assert "Traceback" not in said, said


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        if (program := find_browser(playwright)) is None:
            (pytest.fail if os.environ.get("ETUDE_SKIP_NOTHING") else pytest.skip)(NO_BROWSER)
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def window(browser):
    """What all tabs share is Streamlit's own code, which is then read and compiled once: loading it is half the time of
    a test. A tab is a session of its own."""
    context = browser.new_context(accept_downloads=True, reduced_motion="reduce")
    context.set_default_timeout(SLOW)
    context.add_init_script(
        "localStorage.clear()"
    )  # where a tab would find whether the sidebar was open in the one before it
    yield context
    context.close()


@contextmanager
def opened(window, width):
    """A tab in which nothing may go wrong, with `errors`, all that did."""
    tab = window.new_page()
    tab.set_viewport_size({"width": width, "height": 900})
    tab.errors = []

    def said(message):
        # Opened below the root, Streamlit's own client first asks there whether the server is well, and then at the
        # root.
        if message.type == "error" and "/_stcore/h" not in message.location["url"]:
            tab.errors.append(f"{message.text} {message.location['url']}")

    tab.on("console", said)
    tab.on("pageerror", lambda error: tab.errors.append(str(error)))
    yield tab
    tab.close()


@pytest.fixture(params=WIDTHS)
def tab(request, window):
    with opened(window, request.param) as tab:
        yield tab


wide, narrow = (pytest.mark.parametrize("tab", [width], indirect=True) for width in WIDTHS)
"""For a test of what does not depend on the width."""


def settled(tab):
    """Waits until the page is drawn to its end: in the page, because `expect` looks only every second in the end."""
    tab.locator("h1").first.wait_for()
    tab.locator('[data-testid="stApp"][data-test-script-state="notRunning"]').wait_for(state="attached")
    return tab


def open_menu(tab, name):
    """Opens the menu of a chart. Returns its content."""
    button = settled(tab).locator(f".st-key-menu-{name} button")
    button.scroll_into_view_if_needed()
    button.dispatch_event("click")  # on a narrow screen the sidebar may still lie over it
    content = tab.get_by_test_id("stPopoverBody")
    expect(content.get_by_role("button", name="Picture (PNG)")).to_be_visible()
    return content


def follow(tab, title):
    """To another page by the sidebar, which a narrow screen hides."""
    settled(tab)
    if tab.viewport_size["width"] < 800:
        tab.get_by_test_id("stExpandSidebarButton").click()
    tab.get_by_role("link", name=title, exact=True).click()


def cut_off(tab):
    """Beginnings of code that is wider than its box; folded code is opened first."""
    folded = tab.locator("details:not([open]) > summary")
    while folded.count():
        folded.evaluate_all("all => all.forEach(one => one.click())")
    code = tab.locator("pre:has(code.language-python)")
    expect(code.first).to_be_visible()
    return code.evaluate_all(
        "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 80))"
    )


def test_every_page_opens_without_an_error(window, address):
    """By the sidebar, in one session, on a wide screen that becomes a narrow one, or on a narrow one that becomes wide:
    nothing is wider than the screen, no code is cut off, and a wide picture keeps a size that can be read where there
    is no room for it. Only the committed pictures of experiments stand still."""
    with opened(window, WIDTHS[0]) as tab:
        tab.goto(address)
        for number, page in enumerate(PAGES):
            link = settled(tab).get_by_test_id("stSidebar").locator("a").get_by_text(page.title, exact=True)
            link.dispatch_event("click")  # on a narrow screen it lies folded
            tab.locator("h1").first.filter(has_text=page.title).wait_for()
            expect(settled(tab).locator("h1").first).to_have_text(page.title)
            assert tab.locator('[data-testid="stException"]').count() == 0, page.name
            if page.look:
                tab.locator(f"img, {CHART} svg.marks").first.wait_for()
            still = tab.get_by_test_id("stImage")
            if page.name == "claims":
                expect(still.first).to_be_visible()
            assert page.name == "claims" or not still.count(), f"{page.name} has a picture that does not answer"
            for width in reversed(WIDTHS) if number % 2 else WIDTHS:  # the first is that of the page before
                tab.set_viewport_size({"width": width, "height": 900})
                fits(tab, page, width)
                if page.name == "kl":  # all pages show their code in one way
                    assert not cut_off(tab)
            assert not tab.errors, (page.name, tab.errors)


def fits(tab, page, width):
    """Fails if the page, once it is drawn at this width, is wider, or a wide picture too small."""
    if width < 640:  # the sidebar goes, and takes its time
        tab.locator('[data-testid="stSidebar"][data-collapsed="true"]').wait_for(state="attached")
    wide = tab.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
    assert wide <= width, f"{page.name} is {wide} pixels wide on a screen of {width}"
    for picture in tab.locator(f'[class*="st-key-wide-"] :is(img, {CHART})').all()[:1]:
        drawn = picture.bounding_box()["width"]
        assert 700 < drawn < 900 if width < 640 else drawn < width, (page.name, drawn)
    assert bool(tab.locator('[class*="st-key-wide-"]').count()) == (
        page.name in ("summary", "replay", "async-rl", "weight-sync", "feature-deletion", "textual-feedback", "claims")
    )


@wide
def test_a_slider_moves_by_keyboard_and_the_link_reopens_what_it_says(tab, address):
    tab.goto(f"{address}/penalties")
    slider = settled(tab).get_by_role("slider", name="q: how much it bends")
    before = float(slider.input_value())
    slider.focus()
    for _ in range(4):
        slider.press("ArrowRight")
    after = round(before + 0.2, 6)
    tab.wait_for_url(lambda url: f"q={after:g}" in url)  # every key is a redraw of its own
    settled(tab)
    again = tab.context.new_page()
    again.goto(tab.url)
    expect(settled(again).get_by_role("slider", name="q: how much it bends")).to_have_value(f"{after:g}")
    assert not tab.errors


@narrow
def test_back_from_another_page_brings_the_edits_back(tab, address):
    edits = "1_40~0.25_80~0_40"
    tab.goto(f"{address}/advantages?preset=one+success&group={edits}")
    follow(tab, "Length penalties")
    tab.wait_for_url("**/penalties*")
    settled(tab)
    for _ in range(2):  # Streamlit may leave an entry without a query behind where a link leads to another page
        tab.go_back()
        expect(tab.locator("h1").first).to_have_text("Group advantages")
        settled(tab)
        if f"group={edits}" in tab.url:
            break
    tab.wait_for_url(f"**group={edits}*")
    open_menu(tab, "advantages")
    for _ in range(20):
        try:
            with settled(tab).expect_download(timeout=SLOW / 12) as loading:
                tab.get_by_test_id("stPopoverBody").get_by_role("button", name="Data (CSV)").dispatch_event("click")
        except Slow:
            continue  # the button was drawn anew just then
        with open(loading.value.path(), newline="") as file:
            rewards = [float(row["reward"]) for row in csv.DictReader(file)]
        if len(rewards) == 3:
            break
        tab.wait_for_timeout(250)  # until the page is drawn again
    assert rewards == [1.0, 0.25, 0.0] and f"group={edits}" in tab.url
    assert not tab.errors


@wide
def test_the_url_names_the_run_that_is_shown(tab, address):
    tab.goto(f"{address}/recipe?curves=Pretraining")
    tab.wait_for_url("**/recipe?*run=committed+example*")
    settled(tab)
    assert "curves=Pretraining" in tab.url and not tab.errors


@wide
def test_data_are_downloaded_as_csv(tab, address):
    tab.goto(f"{address}/advantages?preset=one+success")
    buttons = settled(tab).get_by_role("button", name="Data (CSV)")
    expect(buttons).to_have_count(1)  # that of the table; charts have theirs in a menu
    menu = open_menu(tab, "advantages")
    expect(menu.get_by_test_id("stDataFrame")).to_be_visible()
    with tab.expect_download() as loading:
        menu.get_by_role("button", name="Data (CSV)").click()
    with open(loading.value.path(), newline="") as file:
        rows = list(csv.DictReader(file))
    assert loading.value.suggested_filename == "advantages.csv" and len(rows) == 8
    assert [float(row["reward"]) for row in rows] == [1.0, *[0.0] * 7] and float(rows[0]["Dr. GRPO"]) == 0.875
    assert not tab.errors


@narrow
def test_a_page_leads_to_its_lesson(tab, address):
    tab.goto(f"{address}/kl?samples=1000&kl=0.5")
    settled(tab).locator('[data-testid="stPageLink"] a').click()
    tab.wait_for_url("**/lesson?n=*")
    expect(tab.locator("h1").first).to_contain_text("KL")
    expect(tab.locator("h1").first).not_to_have_text("KL estimators")
    assert not tab.errors


def test_the_diagram_leads_to_a_stage_its_page_and_its_answer(window, address):
    """By keyboard on a narrow screen, and in one session: what a reload would forget is still there."""
    with opened(window, WIDTHS[1]) as tab:
        tab.goto(f"{address}/start")
        settled(tab).evaluate("window.kept = true")
        card = tab.get_by_role("heading", name="KL", exact=True)
        diagram = tab.get_by_role("navigation", name="Stages of the recipe")
        diagram.get_by_role("link", name="KL", exact=True).press("Enter")
        tab.wait_for_url("**/start#kl")
        expect(card).to_be_in_viewport()
        tab.get_by_role("link", name="Page: KL estimators").press("Enter")
        tab.wait_for_url("**/kl*")
        expect(tab.locator("h1").first).to_have_text("KL estimators")
        answer = settled(tab).get_by_text("k1 has zero expected gradient")
        expect(answer).to_be_hidden()
        tab.locator("summary", has_text="Show the answer").press("Enter")
        expect(answer).to_be_visible()
        assert tab.evaluate("window.kept") and not tab.errors


def test_an_equation_of_two_lines_is_drawn(tab, address):
    tab.goto(f"{address}/lesson?n=10")
    expect(settled(tab).locator(".katex-display").first).to_be_visible()
    expect(tab.locator("h2", has_text="Where to read on")).to_be_visible()  # its end
    assert not tab.locator(".katex-error").count() and not cut_off(tab) and not tab.errors


def test_pages_are_reached_by_their_links_and_no_setting_goes_along(tab, address):
    tab.goto(f"{address}/advantages?preset=all+equal&group=1_2~0_3")
    follow(tab, "Claims")
    tab.wait_for_url("**/claims*")
    expect(tab.locator("h1").first).to_have_text("Claims")
    assert tab.url == f"{address}/claims"
    assert not tab.errors


def verdicts(tab):
    """Of the agent before RL and of the one after it, once both have played to the end."""
    last = settled(tab).locator(".rollout > .said:last-child")
    expect(last).to_have_count(2)
    for one in (last.first, last.last):
        expect(one).to_contain_text("verdict")
    return last.all_inner_texts()


def a_token_is_told(tab, width):
    """While the mouse is over it, within the screen; the page opens on an agent at work."""
    if width < 640:
        tab.locator('[data-testid="stSidebar"][data-collapsed="true"]').wait_for(state="attached")
    assert tab.locator(".rollout").first.bounding_box()["y"] < 0.8 * tab.viewport_size["height"]
    token = tab.locator(".token").first
    told = token.locator(".more")
    tab.mouse.move(0, 0)
    expect(told).to_be_hidden()
    for _ in range(50):  # a screen that has just become narrow may still move the token away from the mouse
        token.hover()
        if place := told.bounding_box():
            break
    expect(told).to_contain_text("else:")
    assert place["x"] >= 0 and place["x"] + place["width"] <= width


def test_the_agent_plays_a_task_and_then_another_docstring(window, address):
    """To its verdict, before and after RL; then on a narrow screen: edited, and again; one turn after the other; and
    with drafts."""
    with opened(window, WIDTHS[0]) as tab:
        tab.goto(f"{address}/watch?task=7")
        before, after = verdicts(tab)
        assert "not solved" in before and "not solved" not in after and "solved" in after, (
            "the task of the committed recording"
        )
        expect(tab.get_by_text("sft, before RL")).to_be_visible()
        expect(tab.get_by_text("agent, after RL")).to_be_visible()
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            a_token_is_told(tab, width)
        prompt = tab.locator(".said").first.inner_text()
        words = tab.get_by_role("textbox", name=re.compile("Docstring of"))
        words.fill("a plus b then double")
        words.press("Enter")
        expect(tab.locator(".rollout").last).to_contain_text("a plus b then double")
        edited = verdicts(tab)
        assert tab.locator(".said").first.inner_text() == prompt and edited[1] != after, (
            "the same files, but another answer"
        )
        assert "doc-" in tab.url
        expect(tab.locator(".token.kept")).to_have_count(0)
        tab.get_by_text("Drafts", exact=True).click()
        expect(tab.locator(".token.kept").first).to_be_visible()
        expect(tab.get_by_text(re.compile(r"drafts kept")).last).to_be_visible()
        assert verdicts(tab) == edited, "drafts change no token"
        whole = tab.locator(".token").count()
        tab.get_by_role("button", name="Play").click()
        expect(tab.get_by_role("button", name="Pause")).to_be_visible()
        # It begins with the first message, and goes on by itself.
        tab.wait_for_function(
            "most => { const now = document.querySelectorAll('.token').length; return 0 < now && now < most }",
            arg=whole,
        )
        expect(tab.get_by_role("button", name="Play")).to_be_visible()
        assert tab.locator(".token").count() == whole and verdicts(tab) == edited and not tab.errors


def test_a_run_that_is_going_on_is_followed_without_a_reload(window, address, folder):
    run = trained(folder / "runs" / "mine", steps=1, ended=False)
    try:
        with opened(window, WIDTHS[0]) as tab, locked(run) as held:
            tab.goto(f"{address}/recipe?run=mine")
            expect(settled(tab).get_by_text("step 1 of 3")).to_be_visible()
            with open(run / "metrics" / "dr-grpo.jsonl", "a") as file:
                file.write('{"step": 2, "reward": 0.5, "success": 0.5}\n')
            expect(tab.get_by_text("step 2 of 3")).to_be_visible()
            held.close()  # as the kernel does for a process that was killed
            expect(tab.get_by_text("interrupted")).to_be_visible()
            assert not tab.errors
    finally:
        shutil.rmtree(folder / "runs")


# -------------------------------------------------------------------------------------------------- charts


def place(tab, name, across=0.6, down=0.45):
    """A point in the plot of a chart, by shares of its width and height."""
    chart = tab.locator(f".st-key-chart-{name} svg.marks")
    expect(chart.locator(".mark-line, .mark-symbol, .mark-rect").first).to_be_attached()
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def test_hovering_tells_a_figure_and_a_brush_filters(window, address):
    with opened(window, WIDTHS[0]) as tab:
        tab.goto(f"{address}/kl?kl=0.5")
        x, y = place(settled(tab), "kl-values", 0.4)
        tab.mouse.move(x, y)
        tab.mouse.move(x + 2, y)
        told = tab.locator("#vg-tooltip-element")
        expect(told).to_be_visible()
        said = told.inner_text().split()
        low, high, share = (float(said[said.index(name) + 1]) for name in ("from", "to", "share"))
        assert low < high and 0 <= share <= 1
        part = tab.get_by_text("Tokens whose value lies between")
        assert not part.count()
        tab.mouse.down()
        tab.mouse.move(x + 120, y, steps=4)
        tab.mouse.up()
        expect(part).to_be_visible()
        assert not tab.errors


def test_a_mark_and_a_row_open_their_rollout(window, address):
    with opened(window, WIDTHS[0]) as tab:
        tab.goto(f"{address}/penalties")
        tab.mouse.click(*place(settled(tab), "marginal-cost", 0.9))
        tab.wait_for_url("**read=*")
        by_mark = tab.url
        rows = tab.locator(".st-key-rows-ranking canvas").first
        settled(tab)
        rows.scroll_into_view_if_needed()
        box = rows.bounding_box()
        tab.mouse.click(box["x"] + 15, box["y"] + 35 * 3.5)
        tab.wait_for_url(lambda url: url != by_mark)
        assert not tab.errors


def test_a_chart_is_light_on_dark(window, address):
    """Its words; its menu lies below it."""
    with opened(window, WIDTHS[1]) as tab:
        tab.emulate_media(color_scheme="dark", reduced_motion="reduce")
        tab.goto(f"{address}/real-time-rl")
        words = settled(tab).locator(f"{CHART} svg.marks .role-axis-title text").first
        expect(words).to_be_attached()
        red, green, blue, *_ = map(int, re.findall(r"\d+", words.evaluate("one => getComputedStyle(one).fill")))
        assert min(red, green, blue) > 128
        menu = open_menu(tab, "real-time-rewards")
        with tab.expect_download() as loading:
            menu.get_by_role("button", name="Picture (PNG)").click()
        with open(loading.value.path(), "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"
        assert not tab.errors
