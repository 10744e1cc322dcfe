// The colour scheme: that of the system, or the one that was chosen last. Loaded before the page is drawn.
"use strict";
(() => {
  const choices = ["system", "light", "dark"];
  const stored = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  let theme = choices.includes(stored()) ? stored() : "system";

  function apply() {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  apply();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.querySelector("[data-theme-switch]");
    if (!button) return;
    const show = () => {
      button.textContent = `◐ ${theme}`;
      button.ariaLabel = button.title = `Theme: ${theme}`;
    };
    button.hidden = false;
    show();
    button.addEventListener("click", () => {
      theme = choices[(choices.indexOf(theme) + 1) % choices.length];
      try { localStorage.setItem("theme", theme); } catch { /* not remembered */ }
      apply();
      show();
    });
  });
})();
