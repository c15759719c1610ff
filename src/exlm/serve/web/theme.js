// Light or dark, decided before anything is painted: a plain script, so that the page does not wait for modules.
"use strict";

try {
  const chosen = JSON.parse(localStorage.getItem("exlm.theme"));
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Without a readable choice the system decides.
}
