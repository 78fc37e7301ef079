// Going through the steps: buttons, a strip with every step on it, the place in words, filters.

function makePlayer() {
  const scrub = byId("scrub"), strip = byId("strip");
  byId("first").addEventListener("click", () => goBy(-Infinity));
  byId("previous").addEventListener("click", () => goBy(-1));
  byId("next").addEventListener("click", () => goBy(1));
  byId("last").addEventListener("click", () => goBy(Infinity));
  byId("trouble").addEventListener("click", () => goToTrouble(1));
  scrub.addEventListener("input", () => goToStep(looking.shown[Number(scrub.value)]));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => drawStrip(strip, dark.matches);
  dark.addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(strip);

  on("steps", () => {
    scrub.max = Math.max(0, looking.shown.length - 1);
    scrub.disabled = looking.shown.length < 2;
    redraw();
  });
  on("step", () => {
    byId("told").hidden = true;
    const {shown, step} = looking;
    const at = step === ABSENT ? 0 : positionOf(step);
    const text = step === ABSENT ? "No step" : sentence(step, at, shown.length);
    scrub.value = at;
    scrub.setAttribute("aria-valuetext", text);
    byId("position").textContent = step === ABSENT ? "no step" : `${grouped(at + 1)} of ${grouped(shown.length)}`;
    // A button that has the focus keeps it at the end of the way, so it is not disabled but says that it does nothing.
    for (const id of ["first", "previous"]) byId(id).setAttribute("aria-disabled", at === 0);
    for (const id of ["next", "last"]) byId(id).setAttribute("aria-disabled", at >= shown.length - 1);
    announce(text);
  });
}

function sentence(step, at, count) {
  const kind = trace.kinds[trace.kindOf[step]];
  const way = kind.source === kind.target ? `stays ${kind.target}` : `${kind.source} to ${kind.target}`;
  return `Step ${at + 1} of ${count}: ${trace.words[trace.subjectOf[step]]} ${kind.event}, ${way}, ${kind.outcome.replace("_", " ")}`;
}

// One column for each pixel: the state that its first step led to, and above it whether any of its steps went wrong.
function drawStrip(strip, dark) {
  const width = strip.clientWidth, height = strip.clientHeight, count = looking.shown.length;
  if (!width) return;
  const ratio = devicePixelRatio || 1;
  strip.width = Math.round(width * ratio);
  strip.height = Math.round(height * ratio);
  const pen = strip.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const red = style.getPropertyValue("--bad"), amber = style.getPropertyValue("--refused");
  for (let x = 0; x < strip.width; x++) {
    const first = Math.floor((x / strip.width) * count);
    const end = Math.max(first + 1, Math.floor(((x + 1) / strip.width) * count));
    if (first >= count) break;
    let trouble = "";
    for (let at = first; at < end && trouble !== "failed"; at++) {
      trouble = trace.kinds[trace.kindOf[looking.shown[at]]].trouble || trouble;
    }
    pen.fillStyle = stateColour(trace.kinds[trace.kindOf[looking.shown[first]]], dark);
    pen.fillRect(x, strip.height * 0.35, 1, strip.height * 0.65);
    if (trouble) {
      pen.fillStyle = trouble === "failed" ? red : amber;
      pen.fillRect(x, 0, Math.max(1, ratio), strip.height * 0.3);
    }
  }
}

// A hue of its own for each state of a machine, so that the rhythm of a life can be seen.
function stateColour(kind, dark) {
  const machine = machineOf.get(kind.machine);
  const index = machine ? machine.states.findIndex((state) => state.name === kind.target) : 0;
  const hue = (205 + Math.max(0, index) * 47) % 360;
  return dark ? `hsl(${hue} 38% 42%)` : `hsl(${hue} 46% 74%)`;
}

function makeFilters() {
  const everything = trace.subjects[0];
  const button = (trouble, label, mark) => {
    const box = byId(`only-${trouble}`);
    box.append(el("span", {"aria-hidden": "true"}, `${mark} `), `${label} `, el("span", {class: "number"}, grouped(everything[trouble])));
    box.addEventListener("click", () => toggleOnly(trouble));
    return () => box.setAttribute("aria-pressed", looking.only.has(trouble));
  };
  const marks = [button("refused", "Refused", "\u2298"), button("failed", "Failed", "\u2715")];
  const place = byId("only-place");
  place.addEventListener("click", () => {
    filterBy({place: null});
    byId("timeline").focus();
  });
  on("subjects", () => {
    for (const mark of marks) mark();
    place.hidden = looking.place === null;
    if (looking.place) {
      const {machine, row, state} = looking.place;
      const what = row === undefined ? `into ${state}` : `row ${row}`;
      place.replaceChildren(`${machine}: ${what} `, el("span", {"aria-hidden": "true"}, "\u2715"));
      place.setAttribute("aria-label", `Only ${machine} ${what}; show all again`);
      place.setAttribute("aria-pressed", "true");
    }
  });
  const search = byId("search");
  search.addEventListener("input", () => {
    looking.query = search.value;
    tell("subjects");
  });
}
