// A page that is opened from a folder may not start a worker, which the search needs. There, one runs in a hidden frame.
(() => {
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    onmessage = null;
    onerror = null;

    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.body.append(this.frame);
      // Written, so that no browser puts another empty page in its place later.
      this.frame.contentDocument.open();
      this.frame.contentDocument.write("<!doctype html><title>search</title><body></body>");
      this.frame.contentDocument.close();
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.#tell(new MessageEvent("message", { data }));
      inside.importScripts = (...addresses) => Promise.all(addresses.map((address) => this.#load(address)));
      this.ready = this.#load(url);
    }

    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.frame.remove();
    }

    #tell(event) {
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    #load(address) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = new URL(address, document.baseURI).href;
        script.onload = done;
        script.onerror = failed;
        this.frame.contentDocument.body.append(script);
      });
    }
  }

  window.Worker = FrameWorker;
})();
