// The tabs of the machines, and a machine as tables: its rows, its states.

function makeMachineTabs() {
  const tabs = byId("machines");
  for (const machine of machines) {
    const tab = el("button", {type: "button", role: "tab", id: `machine-${machine.name}`, "aria-controls": "machine",
      click: () => showMachine(machine.name)}, machine.name);
    tabs.append(tab);
  }
  tabs.addEventListener("keydown", (event) => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    const at = machines.findIndex((machine) => machine.name === looking.machine);
    const to = {Home: 0, End: machines.length - 1}[event.key] ?? (at + by + machines.length) % machines.length;
    if (!(to >= 0)) return;
    event.preventDefault();
    event.stopPropagation();
    showMachine(machines[to].name);
    byId(`machine-${machines[to].name}`).focus();
  });
  for (const button of byId("views").children) button.addEventListener("click", () => showView(button.dataset.view));
  const mark = () => {
    for (const tab of tabs.children) {
      const chosen = tab.id === `machine-${looking.machine}`;
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
    }
    byId("machine").setAttribute("aria-labelledby", `machine-${looking.machine}`);
    for (const button of byId("views").children) {
      const shown = button.dataset.view === looking.view;
      button.setAttribute("aria-pressed", shown);
      byId(`view-${button.dataset.view}`).hidden = !shown;
    }
  };
  on("machine", mark);
  mark();
}

function makeTables() {
  const made = new Map();
  const makers = {rows: rowTable, states: stateTable};
  function show() {
    const make = makers[looking.view];
    const machine = machineOf.get(looking.machine);
    if (!make || !machine) return;
    const key = `${looking.view} ${looking.machine}`;
    if (!made.has(key)) made.set(key, make(machine));
    const view = byId(`view-${looking.view}`), table = made.get(key);
    if (view.firstChild !== table) view.replaceChildren(table);
    mark(table);
  }
  function mark(table) {
    for (const row of table.querySelectorAll("[aria-current]")) {
      row.removeAttribute("aria-current");
      row.classList.remove("refused", "failed");
    }
    const lit = trace && looking.step !== ABSENT ? litNow() : null;
    if (!lit) return;
    const at = looking.view === "states" ? `[data-state="${CSS.escape(lit.state)}"]` : lit.kind && `[data-row="${lit.kind.row}"]`;
    const row = at && table.querySelector(at);
    if (!row) return;
    row.setAttribute("aria-current", "true");
    if (lit.kind?.trouble) row.classList.add(lit.kind.trouble);
    row.scrollIntoView({block: "nearest"});
  }
  on("machine", show);
  on("step", show);
}

function rowTable(machine) {
  const fired = (row) => trace.fired.rows.get(`${machine.name} ${row}`) || 0;
  const head = ["row", "from and to", "event and guards", "steps and failures", ...(trace ? ["fired"] : [])];
  const rows = machine.rows.map((row) => el("tr", {"data-row": row.row},
    el("th", {scope: "row", class: "number"}, String(row.row)),
    el("td", null, el("div", null, stateName(row.source)),
      el("div", null, el("span", {class: "soft", "aria-label": "to"}, "\u2192 "),
        row.target === row.source ? el("span", {class: "soft"}, "stays") : stateName(row.target))),
    el("td", null, el("div", {class: "name event"}, row.event), ...row.guards.map((guard) => el("div", {class: "name soft"}, guard))),
    el("td", null, stepList(row.steps), ...failures(row)),
    ...(trace ? [el("td", {class: "number"}, countButton(fired(row.row), machine.name, {row: row.row}, `row ${row.row}`))] : []),
  ));
  return table(machine, head, rows);
}

function stateTable(machine) {
  const entered = (state) => trace.fired.states.get(`${machine.name} ${state}`) || 0;
  const head = ["state and phase", "meaning", "holds", "on entry", ...(trace ? ["entered"] : [])];
  const marks = (state) => [state.name === machine.initial && "initial", state.final && "final",
    state.outstanding && "device work may be outstanding"].filter(Boolean).join(", ");
  const rows = machine.states.map((state) => el("tr", {"data-state": state.name},
    el("th", {scope: "row"}, stateName(state.name), el("div", {class: "soft"}, state.phase)),
    el("td", null, state.meaning, el("div", {class: "soft"}, marks(state))),
    el("td", null, state.holds),
    el("td", null, stepList(state.on_enter)),
    ...(trace ? [el("td", {class: "number"},
      countButton(entered(state.name), machine.name, {state: state.name}, `state ${state.name}`))] : []),
  ));
  return table(machine, head, rows);
}

function table(machine, head, rows) {
  const follows = machine.follows && el("p", {class: "remark"}, followsOf(machine));
  return el("div", null, follows || "", el("table", null,
    el("thead", null, el("tr", null, ...head.map((name) => el("th", {scope: "col"}, name)))),
    el("tbody", null, ...rows)));
}

// Why a machine has rows and nothing is ever lit in it.
function followsOf(machine) {
  if (!machine?.follows) return "";
  return `Follows the steps of ${machine.follows}; its rows have none of their own, and it has no steps in a trace.`;
}

function countButton(count, machine, place, what) {
  if (!count) return "0";
  const label = `${plural(count, "step")} of ${what}; show them`;
  return el("button", {type: "button", class: "link", "aria-label": label, title: label,
    click: () => filterBy({place: {machine, ...place}})}, grouped(count));
}

function choseState(machine, state) {
  if (!machineOf.get(machine).stateOf.has(state)) return;
  if (trace && trace.fired.states.get(`${machine} ${state}`)) filterBy({place: {machine, state}});
  else {
    showView("states");
    const row = byId("view-states").querySelector(`[data-state="${CSS.escape(state)}"]`);
    row.scrollIntoView({block: "center"});
    row.classList.add("called");
    setTimeout(() => row.classList.remove("called"), 1500);
  }
}

function failures(row) {
  const ways = [["device error", row.on_failure, row.failure_steps], ["drain", row.on_drain_failure, []],
    ["publish", row.on_publish_failure, row.publish_failure_steps]];
  return ways.filter(([, end]) => end !== null).map(([cause, end, steps]) => el("div", {class: "failure"},
    `${cause} \u2192 `, stateName(end), steps.length ? stepList(steps) : ""));
}

function stepList(steps) {
  if (!steps.length) return "";
  return el("ol", {class: "steps"}, ...steps.map((step) => el("li", {class: `kind-${step.kind}`, title: KINDS[step.kind] || ""}, step.name)));
}

const KINDS = {
  host: "work on the host",
  publish: "publishes; may be refused",
  enqueue: "enqueues device work",
  clear: "enqueues the upload of cleared rows",
  wait: "waits for the device",
  couple: "an event offered to another machine",
};

function stateName(name) {
  return el("span", {class: "state"}, name);
}
