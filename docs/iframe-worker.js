// Browsers refuse to start a Worker on a page that was opened from a disk. Here a hidden frame runs its script instead,
// so that the search works there too. The plugin `offline` takes any script of this name for what it needs.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope = new Promise((resolve) => {
        const script = scope.document.createElement("script");
        script.src = url;
        script.onload = () => resolve(scope);
        scope.document.body.append(script);
      });
    }

    async postMessage(data) {
      (await this.scope).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
