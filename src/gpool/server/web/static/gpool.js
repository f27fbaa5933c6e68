// Small behaviour of the pages: copy, follow, ages, local times. Everything else works without scripts.
(() => {
  "use strict";
  const all = (selector, root = document) => root.querySelectorAll(selector);

  // One-time links: the page sends its form by itself.
  for (const form of all("form[data-submit]")) form.requestSubmit();

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button || !navigator.clipboard) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    button.classList.add("copied");
    setTimeout(() => button.classList.remove("copied"), 1200);
  });

  // Destructive forms ask once, with the name of the thing.
  document.addEventListener("submit", (event) => {
    const question = event.submitter?.dataset.confirm || event.target.dataset.confirm;
    if (question && !confirm(question)) event.preventDefault();
  }, true);

  const local = (root) => {
    for (const time of all("time[data-clock]", root)) {
      const at = new Date(time.dateTime);
      time.textContent = at.toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"});
      time.title = at.toLocaleString();
      time.removeAttribute("data-clock");
    }
  };
  local(document);

  // Filters apply while typing.
  for (const form of all("form[data-auto]")) {
    let timer;
    const send = () => { clearTimeout(timer); timer = setTimeout(() => form.requestSubmit(), 400); };
    form.addEventListener("change", send);
    form.addEventListener("input", (event) => { if (event.target.type === "search") send(); });
  }

  // A stream that ends is aborted by htmx; that is no fault.
  addEventListener("unhandledrejection", (event) => {
    if (event.reason?.name === "AbortError") event.preventDefault();
  });

  // Live state: said at the top, with the age of the data.
  const live = document.getElementById("live");
  let heard = Date.now();
  const say = (kind, text) => {
    if (!live || live.textContent === text) return;
    live.className = `s ${kind}`;
    live.textContent = text;
  };
  document.addEventListener("htmx:sse:after:connection", () => { heard = Date.now(); say("free", "live"); });
  document.addEventListener("htmx:sse:before:message", () => { heard = Date.now(); say("free", "live"); });
  document.addEventListener("htmx:sse:error", () => say("fail", "connection lost"));
  document.addEventListener("htmx:after:swap", () => local(document));
  // The trigger "every 5s" connects where the first request was refused; it does nothing while a stream is open.
  document.addEventListener("ended", (event) => {
    heard = Infinity;
    say("off", "ended");
    setTimeout(() => event.target.remove());
  });
  document.addEventListener("signed-out", () => location.assign("/sign-in"));
  document.addEventListener("reload", () => location.reload());
  if (live) setInterval(() => {
    const age = Math.round((Date.now() - heard) / 1000);
    if (age > 20) say("fail", `connection lost, data of ${age} s ago`);
  }, 1000);

  // The log follows its end until the reader scrolls up.
  const log = document.getElementById("log");
  const follow = document.getElementById("follow");
  if (log && follow) {
    const bottom = () => { if (follow.checked) log.scrollTop = log.scrollHeight; };
    new MutationObserver(bottom).observe(log, {childList: true, subtree: true});
    log.addEventListener("scroll", () => {
      follow.checked = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    });
    follow.addEventListener("change", bottom);
    bottom();
  }

  // Select all rows of a list.
  document.addEventListener("change", (event) => {
    if (!event.target.matches("[data-all]")) return;
    for (const box of all(`input[name="${event.target.dataset.all}"]`)) box.checked = event.target.checked;
  });
})();
