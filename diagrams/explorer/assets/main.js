// Putting it together: the head of the page, the keys, the place in the address.

function makeHead() {
  const facts = trace ? [["trace", trace.name], ["steps", grouped(trace.count)], ...trace.facts] : [["machines", String(machines.length)]];
  byId("facts").append(...facts.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
  const notes = trace ? [...trace.notes, ...(stepped ? [] : ["The trace has no steps."])] : [];
  byId("notes").append(...notes.map((note) => el("p", null, note)));
  const help = byId("help");
  byId("help-open").addEventListener("click", () => help.showModal());
}

function makeKeys(picture, requests) {
  const views = ["picture", "rows", "states"];
  const always = {
    "+": () => picture.zoomBy(1.25),
    "=": () => picture.zoomBy(1.25),
    "-": () => picture.zoomBy(0.8),
    "0": () => picture.fit(),
    "v": () => showView(views[(views.indexOf(looking.view) + 1) % views.length]),
    "?": () => byId("help").showModal(),
  };
  const traced = requests && {
    "n": () => goToTrouble(1),
    "p": () => goToTrouble(-1),
    "[": () => requests.goBy(-1),
    "]": () => requests.goBy(1),
    "f": () => picture.toggleFollow(),
    "/": () => byId("search").focus(),
  };
  const letters = {...always, ...traced};
  const arrows = requests && {
    ArrowLeft: () => goBy(-1),
    ArrowRight: () => goBy(1),
    Home: () => goBy(-Infinity),
    End: () => goBy(Infinity),
  };
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || byId("help").open) return;
    const {target, key} = event;
    if (target.matches("input[type=search]")) {
      if (key === "ArrowDown" || key === "Enter") {
        event.preventDefault();
        requests.enter();
      }
      return;
    }
    const table = byId("letters").checked && letters[key] ? letters : arrows || {};
    if (!Object.hasOwn(table, key) || (target.matches("input[type=range]") && table === arrows)) return;
    event.preventDefault();
    table[key]();
  });
}

// #step-42 in the address is that step, so a place in a trace can be bookmarked or put into a report.
function makeAddress() {
  const wanted = () => Number((/^#step-(\d{1,9})$/.exec(location.hash) || [])[1] || 0) - 1;
  let waiting = 0;
  on("step", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      if (looking.step !== ABSENT) history.replaceState(null, "", `#step-${looking.step + 1}`);
    }, 400);
  });
  addEventListener("hashchange", () => {
    const step = wanted();
    if (step >= 0 && step < trace.count && step !== looking.step) goToAnyStep(step);
  });
  const step = wanted();
  return step >= 0 && step < trace.count ? step : ABSENT;
}

function start() {
  document.documentElement.classList.add(stepped ? "with-trace" : "without-trace");
  makeHead();
  makeMachineTabs();
  makeTables();
  const picture = makePicture();
  if (stepped) {
    looking.passes = trace.kinds.map(passes);
    const requests = makeRequestList();
    makeTimeline();
    makeDetails();
    makePlayer();
    makeFilters();
    const step = makeAddress();
    // A request is what one came for; without any, everything.
    const first = trace.kindOf.findIndex((kind) => trace.kinds[kind].machine === "request");
    looking.step = step === ABSENT ? Math.max(0, first) : step;
    looking.subject = first === ABSENT && step === ABSENT ? 0 : trace.subjectWith(looking.step);
    collectSteps();
    tell("subjects");
    makeKeys(picture, requests);
  } else {
    makeKeys(picture, null);
  }
  performance.measure("explorer", {start: 0, end: performance.now()});
}

start();
