// Conversations in the browser's own storage, an entry each. The server keeps none.

import { Conversation } from "./conversation.js";

const PREFIX = "kvreclaim-chat/";

// The last changed one first.
export function load() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  const found = names.flatMap((name) => {
    try {
      return [new Conversation(JSON.parse(localStorage.getItem(name)))];
    } catch {
      return []; // what another program wrote is neither shown nor deleted
    }
  });
  return found.sort((one, other) => other.changed - one.changed);
}

// Returns a sentence if there is no room.
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return "";
  } catch {
    return "The browser's storage is full, so this conversation is not kept; export it, or delete older ones.";
  }
}

export const remove = (conversation) => localStorage.removeItem(PREFIX + conversation.id);

// A file that `/load` of `kvreclaim run` reads, too: messages is the path that is shown.
export function exported(conversation) {
  const text = JSON.stringify({ messages: conversation.request(conversation.leaf), conversation }, null, 1);
  return new File([text], `chat-${conversation.id}.json`, { type: "application/json" });
}
