// What is known of the current step: the row, its guards, what ran, what the device was asked, what is held, the call.

function makeDetails() {
  const title = byId("details-title"), body = byId("details-body");
  function show() {
    if (looking.step === ABSENT) {
      title.textContent = "Step";
      body.replaceChildren(el("p", {class: "empty"}, looking.shown.length ? "No step is chosen." : "No step has what is asked for."));
      return;
    }
    const step = trace.step(looking.step), call = trace.call(step.call), {kind} = step;
    const machine = machineOf.get(kind.machine);
    title.textContent = `Step ${grouped(step.number)}`;
    body.replaceChildren(
      headline(step),
      part("Guards", guards(step, machine)),
      part(kind.row < 0 ? "No row fired" : `Row ${kind.row} ran`, ran(step, machine)),
      part("Asked of the device", acts(step)),
      part("Holds", holds(step, machine)),
      part("Call", callOf(call)),
    );
  }
  on("step", show);
}

function part(name, ...content) {
  return el("div", {class: "part"}, el("h3", null, name), ...content);
}

function none(text) {
  return el("p", {class: "none"}, text);
}

function headline({kind, subject}) {
  return el("div", {class: `headline ${kind.trouble}`},
    el("p", {class: "event"}, el("span", {class: "name"}, kind.event),
      el("span", {class: `badge ${kind.trouble || "done"}`}, kind.outcome.replace("_", " "))),
    el("p", {class: "whose"}, `${kind.machine} `, el("span", {class: "subject"}, subject)),
    el("p", {class: "way"}, stateName(kind.source),
      ...(kind.source === kind.target ? [el("span", {class: "soft"}, " stays")] : [
        el("span", {class: "arrow", "aria-label": "to"}, " \u2192 "), stateName(kind.target)])),
    kind.failed ? el("p", {class: "problem"}, "failed at ", el("span", {class: "name"}, kind.failed)) : "",
  );
}

function guards({kind}, machine) {
  if (!kind.guards.length) return none("None were looked at.");
  const row = rowOf(kind, machine);
  return el("ul", {class: "guards"}, ...kind.guards.map(([name, held]) => {
    const wanted = row && (row.guards.includes(name) || row.guards.includes(`not ${name}`));
    return el("li", {class: held ? "held" : "not"},
      el("span", {class: "mark", "aria-hidden": "true"}, held ? "\u2713" : "\u2715"),
      el("span", {class: "name"}, name),
      el("span", {class: "said"}, held ? "holds" : "does not hold", row && !wanted ? ", of another row" : ""));
  }));
}

function rowOf(kind, machine) {
  return machine && kind.row >= 0 ? machine.rows[kind.row] : undefined;
}

function ran({kind}, machine) {
  if (kind.row < 0) return none(`The event ${kind.event} was refused in ${kind.source}; nothing ran and nothing changed.`);
  const row = rowOf(kind, machine), kinds = kindsOfSteps(machine);
  const line = (name, mark, said) => el("li", {class: `kind-${kinds.get(name) || "host"} ${mark}`, title: KINDS[kinds.get(name)] || ""},
    name, said ? el("span", {class: "said"}, said) : "");
  const lines = kind.ran.map((name) => line(name, "", ""));
  if (kind.failed) lines.push(line(kind.failed, "broke", "failed"));
  const idle = row ? row.steps.map((step) => step.name).filter((name) => !kind.ran.includes(name) && name !== kind.failed) : [];
  const rest = idle.length ? el("p", {class: "idle"}, kind.failed ? "Not reached, or nothing to do: " : "Nothing to do: ",
    el("span", {class: "name"}, idle.join(", "))) : "";
  return el("div", null, lines.length ? el("ol", {class: "steps ran"}, ...lines) : none("Nothing: only the state was looked at."), rest);
}

function kindsOfSteps(machine) {
  if (!machine) return new Map();
  if (!machine.kinds) {
    const lists = [...machine.rows.flatMap((row) => [row.steps, row.failure_steps, row.publish_failure_steps]),
      ...machine.states.map((state) => state.on_enter)];
    machine.kinds = new Map(lists.flat().map((step) => [step.name, step.kind]));
  }
  return machine.kinds;
}

function acts({acts, kind}) {
  const ended = kind.ended ? el("p", {class: "ended"}, "Outstanding work ended: ",
    el("span", {class: "name"}, kind.ended.replaceAll("_", " "))) : "";
  if (!acts.length) return el("div", null, none("Nothing."), ended);
  return el("div", null, el("ol", {class: "acts"}, ...acts.map((act) => el("li", {class: act.failed ? "broke" : ""},
    el("span", {class: "name"}, act.verb),
    act.slot === null ? "" : el("span", {class: "said"}, `slot ${act.slot}`),
    act.failed ? el("span", {class: "said problem"}, act.nth === null ? act.failed : `${act.failed} at use ${act.nth}`) : "",
    el("span", {class: "room"}),
    act.digest ? el("code", {title: "digest of the arguments"}, act.digest) : "",
    el("span", {class: "took"}, duration(act.took))))), ended);
}

function holds({kind, slots}, machine) {
  const words = (name) => {
    const state = machine && machine.stateOf.get(name);
    return state ? state.holds || "nothing" : "not known";
  };
  const before = words(kind.source), after = words(kind.target);
  const state = machine && machine.stateOf.get(kind.target);
  return el("dl", {class: "pairs"},
    ...pair("before", before === after ? "" : before),
    ...pair(before === after ? "as before" : "now", after),
    ...pair("state", state ? state.meaning : ""),
    ...pair("device", state && state.outstanding ? "work may be outstanding" : ""),
    ...pair("slots", slots));
}

function pair(name, value) {
  return value ? [el("dt", null, name), el("dd", null, value)] : [];
}

function callOf(call) {
  const steps = [];
  for (let at = call.first; at < call.first + Math.min(call.steps, CALL_STEPS_MAX); at++) steps.push(at);
  return el("div", null,
    el("p", {class: "call"}, el("span", {class: "name"}, call.name), call.request ? el("span", {class: "subject"}, call.request) : "",
      call.result ? el("span", {class: call.result.startsWith("OK") ? "badge done" : "badge failed"}, call.result) : ""),
    el("dl", {class: "pairs"},
      ...pair("number", grouped(call.number)),
      ...pair("given", call.arguments),
      ...pair("at", call.began < 0 ? "" : duration(call.began)),
      ...pair("took", duration(call.took))),
    el("h4", null, plural(call.steps, "step")),
    el("ol", {class: "siblings"}, ...steps.map(sibling)),
    call.steps > steps.length ? none(`and ${grouped(call.steps - steps.length)} more`) : "");
}

const CALL_STEPS_MAX = 60; // a shutdown can cause thousands

function sibling(step) {
  const kind = trace.kinds[trace.kindOf[step]];
  return el("li", null, el("button", {type: "button", class: `sibling ${kind.trouble}`, "aria-current": step === looking.step ? "step" : null,
    click: () => goToAnyStep(step)},
    el("span", {class: "number"}, grouped(step + 1)), el("span", {class: "machine"}, kind.machine), el("span", {class: "name"}, kind.event)));
}
