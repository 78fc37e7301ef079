// What the reader looks at, and the one place that changes it. Whoever shows something of it listens.

const looking = {
  subject: 0, // index into trace.subjects
  step: ABSENT, // number of a step in the whole trace, from 0
  shown: new Int32Array(0), // the steps of the subject that pass the filters
  query: "",
  only: new Set(), // "refused", "failed"
  place: null, // {machine, row} or {machine, state}: only steps of that row, or into that state
  passes: [], // by kind: whether the filters let it through
  machine: machines.length ? machines[0].name : "",
  view: "picture",
};

const listeners = {step: [], steps: [], subjects: [], machine: []};

function on(what, listener) {
  listeners[what].push(listener);
}

function tell(what) {
  for (const listener of listeners[what]) listener();
}

function passes(kind) {
  if (looking.only.size && !looking.only.has(kind.trouble)) return false;
  const place = looking.place;
  if (place === null) return true;
  if (place.machine !== kind.machine) return false;
  return place.row === undefined ? place.state === kind.target : place.row === kind.row;
}

function goToStep(step) {
  if (step === looking.step) return;
  looking.step = step;
  if (step !== ABSENT) {
    const machine = trace.kinds[trace.kindOf[step]].machine;
    if (machineOf.has(machine)) showMachine(machine);
  }
  tell("step");
}

// A step wherever it is: of another subject, or one that a filter hides.
function goToAnyStep(step) {
  const own = trace.subjectWith(step);
  if (!looking.passes[trace.kindOf[step]]) clearFilters();
  if (trace.subjects[looking.subject].name !== null) looking.subject = own;
  looking.step = step;
  collectSteps();
  tell("subjects");
}

// Where a step is, or would be, among those shown.
function positionOf(step) {
  let low = 0, high = looking.shown.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (looking.shown[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

function goBy(count) {
  const {shown, step} = looking;
  if (!shown.length) return;
  const position = Math.max(0, Math.min(shown.length - 1, positionOf(step) + count));
  goToStep(shown[position]);
}

function goToTrouble(direction) {
  const {shown, step} = looking;
  for (let at = positionOf(step) + direction; at >= 0 && at < shown.length; at += direction) {
    if (trace.kinds[trace.kindOf[shown[at]]].trouble) return goToStep(shown[at]);
  }
  const next = nextInTrouble(direction);
  if (next !== undefined) {
    looking.step = direction > 0 ? -1 : trace.count;
    looking.subject = next;
    collectSteps();
    if (!trace.kinds[trace.kindOf[looking.step]].trouble) goToTrouble(direction);
    return;
  }
  const {name, isRequest} = trace.subjects[looking.subject];
  const which = direction > 0 ? "later" : "earlier";
  const where = name === null ? "" : isRequest ? ` of ${name} or of ${direction > 0 ? "a later" : "an earlier"} request` : ` of ${name}`;
  tellReader(`No ${which} step${where} was refused or failed.`);
}

// The request in the list before or behind the current one that has a step which was refused or failed.
function nextInTrouble(direction) {
  const own = looking.subject;
  if (trace.subjects[own].name === null) return undefined;
  const there = subjectsShown().filter((index) => trace.subjects[index].isRequest && (index - own) * direction > 0
    && some(trace.subjects[index].kinds, (kind) => trace.kinds[kind].trouble && looking.passes[kind]));
  return there.at(direction > 0 ? 0 : -1);
}

function goToSubject(subject) {
  if (subject === looking.subject) return;
  looking.subject = subject;
  collectSteps();
}

function filterBy(change) {
  Object.assign(looking, change);
  looking.passes = trace.kinds.map(passes);
  if (looking.only.size || looking.place) {
    const shown = subjectsShown();
    if (shown.length && !shown.includes(looking.subject)) looking.subject = firstRequest(shown);
  }
  collectSteps();
  tell("subjects");
}

// Of some subjects the first request; without one the first with a name, or everything.
function firstRequest(shown) {
  const first = (is) => shown.find((index) => is(trace.subjects[index]));
  return first((subject) => subject.isRequest) ?? first((subject) => subject.name !== null) ?? shown[0];
}

function toggleOnly(trouble) {
  const only = new Set(looking.only);
  if (!only.delete(trouble)) only.add(trouble);
  filterBy({only});
}

function clearFilters() {
  Object.assign(looking, {only: new Set(), place: null});
  looking.passes = trace.kinds.map(passes);
}

function collectSteps() {
  const {steps} = trace.subjects[looking.subject];
  const filtered = looking.only.size || looking.place;
  looking.shown = filtered ? steps.filter((step) => looking.passes[trace.kindOf[step]]) : steps;
  tell("steps");
  const position = Math.min(positionOf(looking.step), looking.shown.length - 1);
  const step = looking.shown.length ? looking.shown[Math.max(0, position)] : ABSENT;
  looking.step = step;
  if (step !== ABSENT) showMachine(trace.kinds[trace.kindOf[step]].machine);
  tell("step");
}

function showMachine(machine) {
  if (machine === looking.machine || !machineOf.has(machine)) return;
  looking.machine = machine;
  tell("machine");
}

function showView(view) {
  looking.view = view;
  tell("machine");
}

// Which subjects the search and the filters leave, as indices; everything is always among them.
function subjectsShown() {
  const words = looking.query.toLowerCase().split(/\s+/).filter(Boolean);
  const filtered = looking.only.size || looking.place;
  const said = words.map((word) => trace.kinds.map((kind) => kind.said.includes(word)));
  const found = [];
  trace.subjects.forEach((subject, index) => {
    const name = (subject.name || "").toLowerCase();
    const matches = words.every(
      (word, at) => name.includes(word) || some(subject.kinds, (kind) => said[at][kind])
    );
    const has = !filtered || some(subject.kinds, (kind) => looking.passes[kind]);
    if (subject.name === null ? !words.length : matches && has) found.push(index);
  });
  return found;
}

function some(set, holds) {
  for (const one of set) if (holds(one)) return true;
  return false;
}

// Said to everybody, and there until something else is looked at.
function tellReader(text) {
  byId("told").textContent = text;
  byId("told").hidden = false;
  announce(text);
}

let announced = 0;

// Read out a moment later, so that running through a thousand steps is not a thousand sentences.
function announce(text) {
  clearTimeout(announced);
  announced = setTimeout(() => { byId("announcer").textContent = text; }, 250);
}
