// Shows answers as their tokens, coloured; only those in view are fetched and drawn.

const VERSIONS = 6; // colours
const BOUNDS = [0.02, 0.1, 0.3, 0.7]; // probabilities between the five shades
const LARGE = 1; // advantages beyond are of the stronger shade
const readout = document.querySelector(".readout");
const scale = document.querySelector(".scale");
let view = "text";

function shade(token) {
  if (view === "mask") return token.output && token.trained ? "m1" : "m0";
  if (!token.output) return "prompt";
  if (view === "advantage") return token.trained ? sign(token.advantage) : "m0";
  if (view === "version") return `v${token.version % VERSIONS}`;
  const probability = Math.exp(token.logprob);
  const above = BOUNDS.findIndex((bound) => probability < bound);
  return `p${above < 0 ? BOUNDS.length : above}`;
}

function sign(advantage) {
  if (Math.abs(advantage) < 0.005) return "a0";
  return `${advantage < 0 ? "down" : "up"}${Math.abs(advantage) > LARGE ? 2 : 1}`;
}

function figures(token) {
  const parts = [`${token.output ? "output" : "prompt"} token ${token.place}`, `id ${token.id}`];
  if (token.output) {
    const probability = Math.exp(token.logprob);
    parts.push(`log-probability ${token.logprob.toFixed(4)} (${(100 * probability).toPrecision(3)} %)`);
    parts.push(`version ${token.version}`, token.trained ? "trained" : "not trained");
    if (token.trained && !Number.isNaN(token.advantage)) parts.push(`advantage ${token.advantage.toFixed(4)}`);
  }
  return parts.join(" · ");
}

function paint(span) {
  span.className = shade(span.token);
  if (span.token.blank) span.classList.add("blank");
}

function spans(data, advantage) {
  return data.ids.map((id, k) => {
    const place = data.start + k;
    const output = place >= data.prompt;
    const text = data.texts === null ? `${id} ` : data.texts[k];
    const span = document.createElement("span");
    span.token = {
      id, output, place: (output ? place - data.prompt : place) + 1, trained: data.loss_mask[k] === 1,
      logprob: data.logprobs[k], version: data.versions[k], blank: text === "",
      advantage,
    };
    // A token may be a part of a character, which the last one of them shows.
    span.textContent = text === "" ? "·" : text;
    paint(span);
    return span;
  });
}

async function part(path) {
  const reply = await fetch(path).catch(() => {
    throw new Error("the service does not answer");
  });
  const data = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(data.error ?? `status ${reply.status}`);
  return data;
}

async function load(answer) {
  const box = answer.querySelector(".tokens");
  const problem = answer.querySelector(".problem");
  const start = box.childElementCount;
  // What failed once is asked for again by its button alone.
  if (answer.busy || !problem.hidden || start >= (answer.total ?? Infinity)) return;
  answer.busy = true;
  try {
    const data = await part(`${answer.dataset.tokens}?start=${start}`);
    answer.total = data.total;
    box.append(...spans(data, Number(answer.dataset.advantage ?? NaN)));
  } catch (error) {
    problem.firstElementChild.textContent = `${start ? "More" : "The"} tokens cannot be shown: ${error.message}`;
    problem.hidden = false;
  }
  answer.busy = false;
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    entry.target.inView = entry.isIntersecting;
    if (entry.isIntersecting && view !== "text") more(entry.target);
  }
}, { rootMargin: "400px" });

async function more(answer) {
  await load(answer);
  // A long answer goes on when its end comes near.
  const box = answer.querySelector(".tokens");
  if (box.childElementCount < (answer.total ?? 0) && !answer.watching) {
    answer.watching = true;
    addEventListener("scroll", () => {
      if (view !== "text" && box.getBoundingClientRect().bottom < innerHeight + 800) load(answer);
    }, { passive: true });
  }
}

function explain() {
  const keys = {
    logprob: [["p0", "below 2 %"], ["p1", "10 %"], ["p2", "30 %"], ["p3", "70 %"], ["p4", "above"]],
    version: [["v0", "one colour a version"]],
    advantage: [["down2", "below −1"], ["down1", "negative"], ["a0", "0"], ["up1", "positive"], ["up2", "above 1"], ["m0", "not trained"]],
    mask: [["m1", "trained"], ["m0", "not trained"]],
  }[view] ?? [];
  scale.replaceChildren(...keys.map(([name, text]) => {
    const key = document.createElement("i");
    key.className = name;
    key.textContent = text;
    return key;
  }));
  if (keys.length) scale.append("Point at a token, or use the arrow keys in an answer, for its id and figures.");
  scale.hidden = keys.length === 0;
}

function show(chosen) {
  view = chosen;
  explain();
  for (const answer of document.querySelectorAll(".answer")) {
    if (view === "text") answer.querySelector(".problem").hidden = true;
    answer.querySelector(".message").hidden = view !== "text";
    answer.querySelector(".tokens").hidden = view === "text";
    for (const span of answer.querySelectorAll(".tokens > span")) paint(span);
    if (view !== "text" && answer.inView) more(answer);
  }
  if (view === "text") readout.hidden = true;
}

// The address has the view, so that a link opens it.
function remember() {
  const here = new URL(location);
  for (const link of [here, ...document.querySelectorAll(".pager a")]) {
    const url = new URL(link.href);
    if (view === "text") url.searchParams.delete("view");
    else url.searchParams.set("view", view);
    link.href = url.href;
  }
  history.replaceState(history.state, "", here);
}

let current = null;

function point(span) {
  current?.classList.remove("now");
  current = span;
  readout.hidden = span === null;
  if (span === null) return;
  span.classList.add("now");
  readout.textContent = figures(span.token);
}

document.addEventListener("pointerover", (event) => {
  const span = event.target.closest(".tokens > span");
  if (span?.token) point(span);
});

document.addEventListener("click", (event) => {
  const problem = event.target.closest(".problem");
  if (!problem || event.target.tagName !== "BUTTON") return;
  problem.hidden = true;
  more(problem.closest(".answer"));
});

document.addEventListener("keydown", (event) => {
  const box = event.target.closest(".tokens");
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  if (!box || !step) return;
  const next = box.contains(current) ? current[step] : box.firstElementChild;
  if (next?.token) {
    event.preventDefault();
    point(next);
    next.scrollIntoView({ block: "nearest" });
  }
});

if (readout) {
  for (const answer of document.querySelectorAll(".answer")) seen.observe(answer);
  const views = document.querySelector(".views");
  views.addEventListener("change", (event) => {
    show(event.target.value);
    remember();
  });
  const wanted = new URLSearchParams(location.search).get("view") ?? "text";
  const known = [...views.elements].find((input) => input.value === wanted) ?? views.elements[0];
  known.checked = true;
  show(known.value);
  remember();
}
