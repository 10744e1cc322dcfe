// Keys and filters. Every page works without this file.
"use strict";
(() => {
  const items = () => [...document.querySelectorAll("[data-item]")];
  const isField = (element) => element instanceof Element && element.matches("input, select, textarea, audio");

  function move(by) {
    const all = items();
    if (!all.length) return;
    const now = all.findIndex((item) => item === document.activeElement || item.contains(document.activeElement));
    const next = now < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(now + by, 0), all.length - 1);
    all[next].focus({ preventScroll: true });
    all[next].scrollIntoView({ block: all[next].matches("article") ? "start" : "nearest" });
  }

  function follow(selector) {
    const link = document.querySelector(selector);
    if (link) link.click();
    return Boolean(link);
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (isField(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    let done = true;
    if (event.key === "j") move(1);
    else if (event.key === "k") move(-1);
    else if (event.key === "ArrowRight") done = follow("a[rel=next]");
    else if (event.key === "ArrowLeft") done = follow("a[rel=prev]");
    else if (event.key === "/") document.getElementById("q").select();
    else if (/^[osprd]$/.test(event.key)) done = follow(`nav a[data-key=${event.key}]`);
    else done = false;
    if (done) event.preventDefault();
  });

  // A filter applies when it is chosen; empty fields stay out of the address.
  for (const form of document.querySelectorAll("form[data-auto]")) {
    form.addEventListener("change", () => form.requestSubmit());
    form.addEventListener("submit", () => {
      for (const field of form.elements) if (field.name && !field.value) field.disabled = true;
    });
  }
  // After "back" the fields are there again.
  window.addEventListener("pageshow", () => {
    for (const field of document.querySelectorAll("form[data-auto] :disabled")) field.disabled = false;
  });
})();
