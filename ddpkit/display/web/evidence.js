// Draws what was found when nothing moved, and after the end: the verdict, the diagnosis, a row for each rank with its stack.

const WITHDRAWN_MS = 5000;
const TONES = { fault: "fault", waiting: "waiting", passed: "passed" };

// While a job runs all of it may be withdrawn; after its end it stays.
class Evidence {
  constructor() {
    this.sentence = make("div", "ddp-sentence");
    this.sentence.setAttribute("role", "status");
    this.diagnosis = make("div", "ddp-diagnosis");
    this.table = make("div", "ddp-ranks");
    this.root = make("div", "ddp-evidence", this.sentence, this.diagnosis, this.table);
    this.root.hidden = true;
    this.ticking = [];
  }

  // `found` is null while the job goes on.
  show(found) {
    clearTimeout(this.withdrawing);
    if (!found) return this.withdraw();
    this.root.dataset.live = "1";
    this.sentence.textContent = found.sentence;
    this.draw(found.rows, found.at);
    this.root.hidden = false;
  }

  withdraw() {
    if (this.root.hidden) return;
    this.root.dataset.live = "gone";
    this.sentence.textContent = "The job goes on by itself.";
    this.table.replaceChildren();
    this.ticking = [];
    this.withdrawing = setTimeout(() => (this.root.hidden = true), WITHDRAWN_MS);
  }

  finish(found, alike) {
    clearTimeout(this.withdrawing);
    delete this.root.dataset.live;
    this.root.hidden = !found;
    if (!found) return;
    this.sentence.textContent = found.sentence;
    this.alike = alike;
    this.draw(found.rows);
    this.diagnosis.replaceChildren(...(found.diagnosis ? [diagnosisOf(found.diagnosis)] : []));
    if (found.rows.some((row) => row.silent != null)) return;
    // Nothing stood still: the lanes have told it all, and this is for a closer look.
    const fold = make("details", "ddp-more", make("summary", "", "Where each rank was"), ...this.table.childNodes);
    this.table.replaceChildren(fold);
  }

  draw(rows, at) {
    const open = new Set([...this.table.querySelectorAll(".ddp-row[open]")].map((row) => row.dataset.rank));
    const all = rows.every((row) => row.tone === "fault");
    this.ticking = [];
    const drawn = rows.map((row) => this.row(row, at, all || this.alike));
    for (const row of drawn) row.open = open.has(row.dataset.rank);
    const timed = rows.some((row) => row.silent != null);
    this.table.dataset.timed = String(timed);
    // With a host's name a rank's is longer; each row is a grid of its own, so all get the width of the longest.
    this.table.style.setProperty("--ddp-name", `clamp(52px, ${8 * Math.max(...rows.map((row) => row.name.length))}px, 160px)`);
    const heads = ["rank", "state", "where", "collective", ...(timed ? [at === undefined ? "for" : "since", "CPU"] : [])];
    const head = make("div", "ddp-cells ddp-ranks-head", make("span"), ...heads.map((word) => make("span", "", word)));
    head.setAttribute("aria-hidden", "true");
    this.table.replaceChildren(head, ...drawn);
  }

  // One rank: a line of cells that opens upon its stack.
  row(row, at, all) {
    const state = make("span", "ddp-state-cell", row.state);
    if (row.tone === "fault" && !all && row.state !== GONE) state.append(make("strong", "", at === undefined ? "at fault" : "holds up the rest"));
    const joined = row.collective && (row.waits ? `in ${row.collective}` : `last: ${row.collective}`);
    const cells = [make("b", "", row.name), state, make("code", "ddp-where", row.where), make("span", row.waits ? "ddp-in" : "ddp-last", joined)];
    if (row.silent != null) cells.push(this.since(row.silent, at), make("span", "ddp-number", `${Math.round(100 * (row.busy ?? 0))} %`));
    const summary = make("summary", "ddp-cells", make("span", "ddp-turn"), ...cells);
    const fold = make("details", "ddp-row", summary, ...stacksOf(row));
    if (!row.stack.length && !row.workers.length) summary.classList.add("ddp-bare");
    fold.dataset.rank = row.rank;
    fold.dataset.tone = TONES[row.tone] ?? "";
    return fold;
  }

  since(silent, at) {
    const cell = make("span", "ddp-number", brief(silent));
    cell.title = "since it last made progress, or joined what it waits in";
    if (at !== undefined) this.ticking.push({ cell, from: at - silent });
    return cell;
  }

  tick(now) {
    for (const { cell, from } of this.ticking) {
      const text = brief(now - from);
      if (cell.textContent !== text) cell.textContent = text;
    }
  }
}

function diagnosisOf({ name, confidence, title, evidence, page }) {
  const known = name !== "unknown";
  const summary = make("summary", "", make("b", "", known ? name : "no diagnosis"), known ? ` · ${confidence} · ${title}` : ` · ${title}`);
  const lines = evidence.map((line) => make("div", "ddp-quote", line));
  const command = known ? [make("div", "", make("code", "", `ddpkit explain ${name}`), make("span", "ddp-last", " has the whole page"))] : [];
  return make("details", "", summary, make("p", "", ...inline(page)), ...lines, ...command);
}

function stacksOf({ stack, workers }) {
  const found = stack.length ? [stackOf(stack, "most recent call first")] : [];
  return [...found, ...workers.map((frames) => stackOf(frames, "its DataLoader worker, most recent call first"))];
}

// The reader's own frames first; the whole stack, with the libraries', below them and folded.
function stackOf(frames, title) {
  const own = frames.filter(([mine]) => mine);
  const others = frames.length - own.length;
  const box = make("div", "ddp-stack", make("div", "ddp-last", title), ...own.map(frameOf));
  if (!others) return box;
  const packages = [...new Set(frames.filter(([mine]) => !mine).map((frame) => frame[4].split("/")[0].replace(/\.py$/, "")))];
  const label = `with ${others} frame${others === 1 ? "" : "s"} of ${packages.slice(0, 3).join(", ")}${packages.length > 3 ? ", …" : ""}`;
  const fold = make("details", "ddp-whole", make("summary", "", label), ...frames.map(frameOf));
  fold.open = !own.length;
  box.append(fold);
  return box;
}

function frameOf([own, line, source, name, file]) {
  return make("div", own ? "ddp-frame ddp-own" : "ddp-frame",
    make("span", "ddp-number", `line ${line}`), make("code", "", source || "…"), make("span", "ddp-last", `${name}, ${file}`));
}

// `code` between backticks, as the catalog writes it.
function inline(text) {
  return text.split("`").map((part, i) => (i % 2 ? make("code", "", part) : part));
}

function brief(s) {
  return s < 100 ? `${Math.max(0, Math.floor(s))} s` : duration(s);
}
