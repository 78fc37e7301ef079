"""The explorer as a test sees it: traces made by hand, pictures drawn by Graphviz, and a page in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace

import pytest
from attrs import field, frozen

from context_cache.diagrams.dot import to_dot
from context_cache.diagrams.engines import pure_version, render
from context_cache.diagrams.explorer import ExplorerTrace, explorer_page
from context_cache.machines import ALL_MACHINES, REQUEST

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --force-prefers-reduced-motion"
).split()


@frozen
class Act:
    verb: str
    digest: str | None = None
    slot: int | None = None
    failed: str | None = None
    nth: int | None = None


@frozen(kw_only=True)
class Step:
    subject: str = "r1"
    machine: str = "request"
    row: int = 0
    event: str = "begin_request"
    source: str = "new"
    target: str = "admitted"
    guards: Mapping[str, bool] = field(factory=dict)
    ran: Sequence[str] = ()
    acts: Sequence[Act] = ()
    slots: str = "0"
    outcome: str = "done"
    failed: str | None = None
    ended: str | None = None


@frozen(kw_only=True)
class Call:
    name: str
    steps: Sequence[Step]
    request: str | None = "r1"
    arguments: str = ""
    result: str = "OK"
    began: int | None = None
    took: int | None = None
    act_times: Mapping[int, Sequence[int]] = field(factory=dict)


def of_row(number, *, subject="r1", outcome="done", **more):
    """A step of a row of the request's table."""
    row = REQUEST.transitions[number]
    ends = {"failed": row.on_failure, "drain_failed": row.on_drain_failure, "publish_failed": row.on_publish_failure}
    guards = {guard.name: guard.wanted for guard in row.guards}
    ran = more.pop("ran", [step.name for step in row.steps])
    return Step(
        subject=subject, row=number, event=row.event, source=row.source, target=ends.get(outcome, row.target),
        guards=guards, ran=ran, outcome=outcome, **more,
    )  # fmt: skip


def find_row(event, source, target=None, **guards):
    """The number of the first row that is meant."""
    for number, row in enumerate(REQUEST.transitions):
        wanted = {guard.name: guard.wanted for guard in row.guards}
        meant = (row.event, row.source) == (event, source) and target in (None, row.target)
        if meant and guards.items() <= wanted.items():
            return number
    raise AssertionError(f"no row {event} from {source}")


def life(subject, *, rounds=2, end="finish"):
    """The calls of one request: admitted, prefilled, some decode steps, ended; each with its coupled steps."""

    def take(event, source, target):
        return Step(subject="coordinator", machine="execution", row=0 if event == "take" else 1, event=event,
                    source=source, target=target, ran=["hold_token" if event == "take" else "free_token"])  # fmt: skip

    def call(name, *steps, **more):
        return Call(name=name, request=subject, steps=steps, **more)

    def mine(event, source, target=None, **more):
        return of_row(find_row(event, source, target), subject=subject, **more)

    acts = [Act("upload_base_rows", "38e69255"), Act("reset_base_lengths", "0a1b2c3d")]
    yield call("begin_request", mine("begin_request", "new"), arguments="1 sequence of 12 tokens",
               began=1_000, took=5_000)  # fmt: skip
    yield call("prepare_prefill", take("take", "free", "held"), mine("prepare_prefill", "admitted", acts=acts),
               began=9_000, took=1_500_000, act_times={1: [1_250, 700]})  # fmt: skip
    yield call("finalize_prefill_publication", take("give_back", "held", "free"),
               mine("finalize_prefill", "prefilling", "settled", ended="by_runtime_sync"))  # fmt: skip
    for _ in range(rounds):
        yield call("prepare_decode_step", take("take", "free", "held"),
                   mine("prepare_decode_step", "settled", "decoding"))  # fmt: skip
        yield call("complete_decode_step", take("give_back", "held", "free"),
                   mine("complete_decode_step", "decoding", "settled"))  # fmt: skip
    yield call(end, mine(end, "settled"))


def small_story():
    """Three requests; the second is refused once and then fails on the device, the third ends at a failed drain."""
    yield from life("r1")
    begin, prefill = find_row("begin_request", "new"), find_row("prepare_prefill", "admitted")
    yield Call(name="begin_request", request="r2", steps=[of_row(begin, subject="r2")])
    refused = Step(subject="r2", row=-1, event="prepare_decode_step", source="admitted", target="admitted",
                   outcome="refused", guards={"growth_possible": False})  # fmt: skip
    yield Call(name="prepare_decode_step", request="r2", steps=[refused], result="raised ContractViolation")
    broken = of_row(
        prefill, subject="r2", outcome="failed", ran=["execution.take", "bind_rows"], failed="upload_base_rows",
        acts=[Act("upload_base_rows", "0badcafe", failed="DeviceError", nth=1)],
    )  # fmt: skip
    yield Call(name="prepare_prefill", request="r2", steps=[broken], result="REQUEST_FAILED")
    yield Call(name="finish", request="r2", steps=[of_row(find_row("finish", "broken"), subject="r2")])
    yield Call(name="begin_request", request="r3", steps=[of_row(begin, subject="r3")])
    yield Call(name="prepare_prefill", request="r3", steps=[of_row(prefill, subject="r3")])
    lost = of_row(find_row("finish", "prefilling"), subject="r3", outcome="drain_failed", failed="drain", ran=[],
                  acts=[Act("drain", failed="not_idle", nth=1)])  # fmt: skip
    yield Call(name="finish", request="r3", steps=[lost], result="POISONED")


def trace_of(calls, **more):
    trace = ExplorerTrace(more.pop("name", "story.jsonl"), (("flavour", "vanilla"), ("pages", "12")), **more)
    for call in calls:
        trace.add(call)
    return trace


@cache
def drawn(spec):
    """The picture as the command puts it into a page."""
    if pure_version() is None:
        pytest.skip("needs graphviz-pure, which comes with the extra draw")
    return render(to_dot(spec, named=True), "svg", "pure").decode()


@pytest.fixture(scope="session")
def picture():
    return drawn


@pytest.fixture(scope="session")
def make():
    """Steps, calls and traces made by hand; test modules cannot import this file."""
    return SimpleNamespace(
        act=Act, step=Step, call=Call, row=of_row, find=find_row, life=life, story=small_story, trace=trace_of
    )


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """Chromium without a window; one for all tests of a process."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs Chromium and its driver; Debian has them as chromium and chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, which the extra test installs")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(chromedriver))
    yield browser
    browser.quit()


class Page:
    """An explorer in the browser."""

    def __init__(self, driver):
        self.driver = driver

    def js(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def click(self, selector):
        self.find(selector).click()

    def text(self, selector):
        return self.js("return document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector):
        return self.js("return [...document.querySelectorAll(arguments[0])].map(one => one.textContent)", selector)

    def press(self, *keys):
        """Keys for whatever has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        chain = ActionChains(self.driver)
        for key in keys:
            chain.send_keys(key)
        chain.perform()

    @property
    def focus(self):
        return self.js("return document.activeElement.id")

    @property
    def step(self):
        """The number of the current step, as the details say it."""
        return int(self.text("#details-title").removeprefix("Step ").replace(",", ""))

    @property
    def subjects(self):
        """The requests that the list shows."""
        return self.texts("#requests [role=option] .name")

    @property
    def events(self):
        """The steps that the timeline shows, in order of their place in the list."""
        rows = self.js(
            "return [...document.querySelectorAll('#timeline [role=option]')]"
            ".map(one => [Number(one.dataset.index), one.querySelector('.name').textContent])"
        )
        return [event for _, event in sorted(rows)]

    @property
    def lit(self):
        """Ids of what is lit in the picture: states and arrows."""
        return self.js("return [...document.querySelectorAll('#canvas :is(.node, .edge).lit')].map(one => one.id)")

    def choose(self, subject):
        """Click a request in the list."""
        rows = self.all("#requests [role=option]")
        next(row for row in rows if row.find_element("css selector", ".name").text == subject).click()

    def emulate(self, **media):
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def resize(self, width, height):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture
def explorer(driver, tmp_path):
    """Opens a page in the browser: ``explorer(trace)``; afterwards nothing was complained of and nothing was loaded."""
    opened = []
    page = Page(driver)

    def show(trace=None, *, machines=ALL_MACHINES, size=(1440, 900), svg_of=drawn, at=""):
        file = tmp_path / f"explorer-{len(opened)}.html"
        file.write_text(explorer_page(machines, trace, svg_of), encoding="utf-8")
        opened.append(file.as_uri())
        page.resize(*size)
        page.emulate(prefers_color_scheme="light")
        driver.get(file.as_uri() + at)
        return page

    driver.get_log("browser")
    driver.get_log("performance")
    yield show
    complaints = driver.get_log("browser")
    assert complaints == []
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    # The browser's own first tab is of no interest.
    loaded = {url.split("#")[0] for url in sent if not url.startswith(("data:", "chrome:"))}
    assert loaded <= set(opened)
    driver.get("about:blank")
