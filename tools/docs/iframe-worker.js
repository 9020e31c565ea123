/* Search without a server: a browser starts no worker from a file's page, so an inline frame runs
 * the worker's script there. Its messages pass between the two windows. */
"use strict";

class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.waiting = [];
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    this.frame.srcdoc =
      "<script>postMessage = (data) => frameElement.worker.answer(data)</script>" +
      `<script src="${new URL(url, document.baseURI)}"></script>`;
    this.frame.worker = this;
    this.frame.addEventListener("load", () => {
      const waiting = this.waiting;
      this.waiting = null;
      waiting.forEach((data) => this.postMessage(data));
    });
    document.documentElement.append(this.frame);
  }

  postMessage(data) {
    if (this.waiting) {
      this.waiting.push(data);
      return;
    }
    const inside = this.frame.contentWindow;
    inside.dispatchEvent(new inside.MessageEvent("message", { data }));
  }

  answer(data) {
    this.dispatchEvent(new MessageEvent("message", { data }));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
