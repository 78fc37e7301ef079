// The picture of the machine: put in, coloured for the screen, moved about, and lit where the current step is.

const FULL = 4 / 3; // CSS pixels of a point
const ZOOM_MIN = 0.1, ZOOM_MAX = 4;
const FOLLOWED = [1, 0.8, 0.6]; // sizes that can still be read

function makePicture() {
  const canvas = byId("canvas");
  const drawn = new Map(); // machine -> {svg, width, height}
  let current = null;
  let zoom = stepped ? 1 : "width"; // or "whole": what fits into the window
  let follow = stepped;
  let byHand = false; // the reader chose the size, so following leaves it alone
  let lastMoved = 0;

  function draw(machine) {
    if (!drawn.has(machine.name)) {
      const root = new DOMParser().parseFromString(machine.svg || "<none/>", "image/svg+xml").documentElement;
      const box = root.nodeName === "svg" ? root.viewBox.baseVal : null;
      if (box === null || !box.width) drawn.set(machine.name, null);
      else {
        const svg = document.importNode(root, true);
        svg.setAttribute("role", "img");
        // Tooltips are anchors without a target; they are for the mouse alone.
        for (const link of svg.querySelectorAll("a")) link.setAttribute("tabindex", "-1");
        recolour(svg);
        drawn.set(machine.name, {svg, width: box.width * FULL, height: box.height * FULL});
      }
    }
    return drawn.get(machine.name);
  }

  function show() {
    const machine = machineOf.get(looking.machine);
    const next = machine ? draw(machine) : null;
    byId("picture-note").hidden = !(stepped && machine?.follows);
    byId("picture-note").textContent = followsOf(machine);
    if (next === current && canvas.firstChild) return;
    current = next;
    canvas.replaceChildren(
      current ? current.svg : el("p", {class: "empty"}, "There is no picture of this machine; its rows are in the table.")
    );
    resize();
  }

  function scaleNow() {
    if (typeof zoom === "number") return zoom;
    const wide = (canvas.clientWidth - 16) / current.width, high = (canvas.clientHeight - 16) / current.height;
    return Math.max(ZOOM_MIN, Math.min(1, wide, zoom === "whole" ? high : 1));
  }

  function resize() {
    if (!current || !canvas.clientWidth) return;
    const scale = scaleNow();
    current.svg.style.width = `${current.width * scale}px`;
    current.svg.style.height = `${current.height * scale}px`;
    byId("zoom-level").textContent = `${Math.round(scale * 100)}%`;
    byId("zoom-fit").setAttribute("aria-pressed", zoom === "whole");
  }

  // The point of the picture that is in the middle stays there.
  function zoomTo(wanted) {
    if (!current) return;
    const before = scaleNow();
    const x = (canvas.scrollLeft + canvas.clientWidth / 2) / before;
    const y = (canvas.scrollTop + canvas.clientHeight / 2) / before;
    zoom = typeof wanted === "number" ? Math.max(ZOOM_MIN, Math.min(ZOOM_MAX, wanted)) : wanted;
    resize();
    const after = scaleNow();
    canvas.scrollTo(x * after - canvas.clientWidth / 2, y * after - canvas.clientHeight / 2);
  }

  function zoomBy(factor) {
    byHand = true;
    zoomTo(scaleNow() * factor);
  }

  function light() {
    if (!current) return;
    const {svg} = current;
    for (const element of svg.querySelectorAll(".lit, .from")) element.classList.remove("lit", "from");
    svg.classList.remove("stepped", "refused", "failed");
    const lit = looking.step === ABSENT ? null : litNow();
    let said = `Picture of the machine ${looking.machine}`;
    if (lit) {
      said += `: ${lit.state} is lit`;
      const state = ofState(svg, lit.state);
      if (state) state.classList.add("lit");
      svg.classList.add("stepped");
      if (lit.kind) {
        if (lit.kind.trouble) svg.classList.add(lit.kind.trouble);
        const source = ofState(svg, lit.kind.source);
        if (source && source !== state) source.classList.add("from");
        for (const element of ofRow(svg, lit.kind)) element.classList.add("lit");
        if (lit.kind.source !== lit.state) said += `, entered from ${lit.kind.source}`;
      }
    }
    svg.setAttribute("aria-label", said);
    if (follow && lit) bringIntoSight(svg);
  }

  function bringIntoSight(svg) {
    if (!canvas.clientWidth) return;
    const lit = [...svg.querySelectorAll(".node.lit, .edge.lit, .node.from")];
    if (!lit.length) return;
    if (!byHand) fitTo(lit);
    const boxes = lit.map((one) => one.getBoundingClientRect()), here = canvas.getBoundingClientRect();
    const state = svg.querySelector(".node.lit")?.getBoundingClientRect() || boxes[0];
    const axis = (low, high, size, scroll, start) => {
      const from = Math.min(...boxes.map((box) => box[low])), to = Math.max(...boxes.map((box) => box[high]));
      // Everything that is lit, if it fits; else the state.
      const middle = to - from < size ? (from + to) / 2 : (state[low] + state[high]) / 2;
      return middle - start - size / 2 + scroll;
    };
    const now = performance.now(), calm = now - lastMoved > 400;
    lastMoved = now;
    canvas.scrollTo({
      left: axis("left", "right", canvas.clientWidth, canvas.scrollLeft, here.left),
      top: axis("top", "bottom", canvas.clientHeight, canvas.scrollTop, here.top),
      behavior: calm && !matchMedia("(prefers-reduced-motion: reduce)").matches ? "smooth" : "instant",
    });
  }

  // The largest of a few sizes at which everything that is lit can be seen; few, so that it seldom changes.
  function fitTo(lit) {
    const boxes = lit.map((one) => one.getBoundingClientRect()), scale = scaleNow();
    const spread = (low, high) => (Math.max(...boxes.map((box) => box[high])) - Math.min(...boxes.map((box) => box[low]))) / scale;
    const room = Math.min(canvas.clientWidth / spread("left", "right"), canvas.clientHeight / spread("top", "bottom"));
    const size = FOLLOWED.find((size) => size <= room) || FOLLOWED.at(-1);
    if (size !== zoom) zoomTo(size);
  }

  function setFollow(wanted) {
    follow = wanted;
    byHand = false;
    byId("follow").setAttribute("aria-pressed", follow);
    if (follow) light();
  }

  moveByHand(canvas, (element) => {
    const node = element.closest(".node[id^='state-']");
    if (node) choseState(looking.machine, node.id.slice("state-".length));
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomBy(Math.exp(-event.deltaY / 300));
  }, {passive: false});
  byId("zoom-in").addEventListener("click", () => zoomBy(1.25));
  byId("zoom-out").addEventListener("click", () => zoomBy(0.8));
  const fit = () => {
    byHand = true;
    zoomTo("whole");
  };
  byId("zoom-fit").addEventListener("click", fit);
  byId("follow").addEventListener("click", () => setFollow(!follow));
  new ResizeObserver(resize).observe(canvas);
  on("machine", () => {
    show();
    light();
  });
  on("step", light);
  show();
  return {zoomBy, fit, toggleFollow: () => setFollow(!follow)};
}

// What is lit in the machine that is shown: the current step, or where this machine stood at that time.
function litNow() {
  const kind = trace.kinds[trace.kindOf[looking.step]];
  if (kind.machine === looking.machine) return {state: kind.target, kind};
  const state = trace.stateAt(looking.machine, looking.step);
  return state === null ? null : {state, kind: null};
}

function ofState(svg, name) {
  return svg.querySelector(`.node[id="${CSS.escape(`state-${name}`)}"]`);
}

// The arrow that a step took, and the label of its row where the picture has one. A row can be on several arrows: its own
// way, and one for each way in which it can fail.
function ofRow(svg, kind) {
  if (kind.row < 0) return [];
  const cause = causeOf(kind);
  if (cause === null) return [];
  const number = String(kind.row);
  const has = (id) => id.replace(/^(a_)?(rows|label)-/, "").split("--", 1)[0].split("-").includes(number);
  const fails = (name) => name.startsWith(`${cause}-`) && name.slice(cause.length + 1).split("-").includes(number);
  const takes = ({id, classList}) => has(id) && (cause ? [...classList].some(fails) : !classList.contains("failure"));
  const says = ({id}) => has(id) && (cause ? id.includes(`--failure-${cause}-`) : !id.includes("--failure"));
  const lit = kind.source === kind.target ? [] : [...svg.querySelectorAll(".edge[id^='rows-']")].filter(takes);
  const labels = [...svg.querySelectorAll("[id^='label-'], [id^='a_label-']")].filter(says);
  const within = (places) => labels.filter((label) => places.some((place) => place && place.contains(label)));
  const own = within(lit);
  const chosen = own.length ? own : within([ofState(svg, kind.source)]);
  return [...lit, ...chosen, ...chosen.flatMap(wordsBehind)];
}

// What stands behind a row's number, up to the next number.
function wordsBehind(label) {
  const words = [];
  for (let next = label.nextElementSibling; next?.nodeName === "text"; next = next.nextElementSibling) words.push(next);
  return words;
}

const CAUSES = {failed: "device-error", drain_failed: "drain-failed", publish_failed: "publish-failed"};

// Which way out of its row a step took: "" its own, the cause of a failure, or null where it took none. Where the step
// ended says it, because a row that fails can fail again on its way out; the outcome decides between ways to one state.
function causeOf({machine, row, outcome, source, target}) {
  const own = machineOf.get(machine)?.rows[row];
  if (outcome === "done" || own?.target === target) return "";
  const ends = own ? {"device-error": own.on_failure, "drain-failed": own.on_drain_failure, "publish-failed": own.on_publish_failure} : {};
  const fitting = Object.keys(ends).filter((cause) => ends[cause] === target);
  const named = Object.hasOwn(CAUSES, outcome) ? CAUSES[outcome] : "device-error";
  return fitting.includes(named) ? named : fitting[0] ?? null;
}

// Every colour of the picture becomes a variable with a second value for dark screens.
const paints = new Map();

function recolour(svg) {
  const background = svg.querySelector(".graph > polygon");
  if (background) background.setAttribute("fill", "none");
  for (const element of svg.querySelectorAll("[fill], [stroke]")) {
    for (const property of ["fill", "stroke"]) {
      const value = element.getAttribute(property);
      const ink = property === "stroke" || element.nodeName === "text";
      if (value && value !== "none" && value !== "transparent") element.style[property] = `var(${paint(value, ink)})`;
    }
  }
}

function paint(value, ink) {
  const key = `${value} ${ink}`;
  if (!paints.has(key)) {
    const name = `--paint-${paints.size}`;
    paints.set(key, name);
    const light = CSS.supports("color", value) ? value : "currentColor";
    document.head.append(el("style", null, `:root { ${name}: ${light}; }
      @media (prefers-color-scheme: dark) { :root { ${name}: ${darkened(light, ink)}; } }`));
  }
  return paints.get(key);
}

// The same hue with the lightness turned around: white paper becomes dark, black ink becomes light.
function darkened(value, ink) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.fillStyle = value;
  const [red, green, blue] = (pen.fillStyle.match(/[0-9a-f]{2}/g) || ["00", "00", "00"]).map((two) => parseInt(two, 16) / 255);
  const most = Math.max(red, green, blue), least = Math.min(red, green, blue), range = most - least;
  const lightness = (most + least) / 2;
  let hue = 0, saturation = 0;
  if (range > 0) {
    saturation = range / (1 - Math.abs(2 * lightness - 1));
    if (most === red) hue = ((green - blue) / range + 6) % 6;
    else hue = most === green ? (blue - red) / range + 2 : (red - green) / range + 4;
  }
  // Ink has to be read on dark paper, whatever its hue; pale paper becomes a deep tone, which needs less of the colour.
  const turned = 0.93 - 0.8 * lightness;
  const shown = ink ? Math.max(turned, range > 0 ? 0.7 : 0.6) : turned;
  if (!ink && lightness > 0.6) saturation *= 0.55;
  return `hsl(${Math.round(hue * 60)} ${Math.round(saturation * 100)}% ${Math.round(shown * 100)}%)`;
}

// Dragging moves the picture; a click without a drag is told.
function moveByHand(canvas, clicked) {
  let from = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType === "mouse") {
      from = {x: event.clientX, y: event.clientY, left: canvas.scrollLeft, top: canvas.scrollTop, moved: false};
    }
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!from) return;
    const x = event.clientX - from.x, y = event.clientY - from.y;
    if (!from.moved && Math.abs(x) + Math.abs(y) > 4) {
      from.moved = true;
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("moving");
    }
    if (from.moved) canvas.scrollTo(from.left - x, from.top - y);
  });
  canvas.addEventListener("click", (event) => {
    const moved = from && from.moved;
    end();
    if (!moved) clicked(event.target);
  });
  const end = () => {
    from = null;
    canvas.classList.remove("moving");
  };
  canvas.addEventListener("pointercancel", end);
  addEventListener("blur", end);
}
