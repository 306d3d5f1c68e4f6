"use strict";
// The server sends what has changed of a run, as HTML that it has escaped. Without this, the page is loaded again and again.
const live = document.getElementById("live");
if (live) {
  const state = document.getElementById("live-state");
  const source = new EventSource(live.dataset.source);
  source.addEventListener("part", (event) => {
    live.innerHTML = JSON.parse(event.data);
    state.textContent = "";
  });
  source.addEventListener("end", () => {
    source.close();
    location.reload();
  });
  source.addEventListener("error", () => {
    state.textContent = "The connection is lost; what follows is old.";
  });
}
