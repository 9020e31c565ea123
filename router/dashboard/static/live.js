// Replaces the page's main part, or what its form has found, by a newer one, every few seconds
// while somebody looks. What is being typed into the form stays.

const SLOWEST = 60;

async function refresh(place) {
  const answer = await fetch(location.href, { signal: AbortSignal.timeout(10_000) });
  if (answer.status === 401) {
    location.reload();
    return;
  }
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById(place.id);
  // Scripts of a parsed page never run, and the policy of this one forbids them anyway.
  if (!fresh) return;
  const scrolled = [...place.querySelectorAll(".wide")].map((table) => table.scrollLeft);
  place.replaceChildren(...fresh.childNodes);
  for (const [k, table] of place.querySelectorAll(".wide").entries()) table.scrollLeft = scrolled[k] ?? 0;
}

function start() {
  const main = document.querySelector("main");
  const place = document.getElementById("found") ?? main;
  const every = Number(main.dataset.live);
  let delay = every;
  let timer = 0;

  function tell(stale) {
    const notice = main.querySelector(".stale");
    if (notice) notice.hidden = !stale;
  }

  async function tick() {
    // What the pointer or the keyboard is on stays as it is.
    if (!document.hidden && !place.contains(document.activeElement)) {
      try {
        await refresh(place);
        delay = every;
        tell(false);
      } catch {
        tell(true);
        delay = Math.min(SLOWEST, delay * 2);
      }
    }
    timer = setTimeout(tick, delay * 1000);
  }

  timer = setTimeout(tick, delay * 1000);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    clearTimeout(timer);
    tick();
  });
}

start();
