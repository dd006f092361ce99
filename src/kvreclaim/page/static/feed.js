// The server's feed: frames of the whole pool, and compactions as they happen.

const RETRY_MS = 3000;
const UNPACKED = 4; // states whose counts are sent: all but free

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

async function inflate(base64) {
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// {owner: Uint16Array, counts: [4] of Uint16Array or null, state: Uint8Array}; see page/frames.py
async function unpack(frame) {
  const buffer = await inflate(frame.cells);
  const num = Math.ceil(frame.shown / frame.group);
  const owner = new Uint16Array(buffer, 0, num);
  let at = 2 * num;
  let counts = null;
  if (frame.group > 1) {
    counts = Array.from({ length: UNPACKED }, (_, i) => new Uint16Array(buffer, at + 2 * num * i, num));
    at += 2 * num * UNPACKED;
  }
  return { owner, counts, state: new Uint8Array(buffer, at, num) };
}

// handlers: frame(frame), compactions(passes, blocks), state(word); a lost connection is opened again
export function watch(handlers) {
  let order = Promise.resolve(); // frames are unpacked one after the other
  const inOrder = (task) => {
    order = order.then(task).catch((error) => console.error(error));
  };
  const source = new EventSource("/page/feed");
  let farewell = null;
  source.addEventListener("open", () => handlers.state("live"));
  source.addEventListener("end", (message) => { farewell = JSON.parse(message.data).reason; });
  source.addEventListener("error", () => {
    handlers.state(farewell ?? "lost");
    // A browser tries again by itself after a broken connection, not after an answer that is an error.
    if (farewell !== null || source.readyState === EventSource.CLOSED) {
      source.close();
      setTimeout(() => watch(handlers), RETRY_MS);
    }
  });
  source.addEventListener("frame", (message) => {
    inOrder(async () => {
      const frame = JSON.parse(message.data);
      frame.cells = await unpack(frame);
      handlers.frame(frame);
    });
  });
  source.addEventListener("compactions", (message) => {
    inOrder(() => {
      const { passes, blocks } = JSON.parse(message.data);
      handlers.compactions(passes, new Uint32Array(bytesOf(blocks).buffer));
    });
  });
}
