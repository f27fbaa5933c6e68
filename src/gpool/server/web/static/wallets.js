// Wallets of this browser, found by EIP-6963 and asked by EIP-1193. The server writes the message; the wallet signs it.
(() => {
  "use strict";
  const root = document.querySelector("[data-wallets]");
  if (!root) return;
  const form = root.querySelector("form");
  const list = root.querySelector("[data-list]");
  const status = root.querySelector("[role=status]");
  const found = new Map();
  let busy = false;

  const say = (text, isError = false) => {
    status.textContent = text;
    status.className = text ? (isError ? "alert" : "note") : "";
  };

  const add = (info, provider) => {
    if (found.has(info.uuid) || typeof provider?.request !== "function") return;
    found.set(info.uuid, provider);
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    if (/^data:image\/[a-z+.-]+[;,]/.test(info.icon || "")) {
      const icon = document.createElement("img");
      icon.src = info.icon;
      icon.alt = "";
      icon.width = icon.height = 20;
      button.append(icon);
    }
    button.append(String(info.name || "Wallet").slice(0, 40));
    button.addEventListener("click", () => use(provider));
    item.append(button);
    list.append(item);
    if (!busy) say("");
  };

  const ask = async (fields) => {
    const body = new URLSearchParams(fields);
    const token = form.elements.csrf;
    if (token) body.set("csrf", token.value);
    const answer = await fetch(root.dataset.wallets, {method: "POST", body, headers: {accept: "application/json"}});
    const document = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(document.detail || `the pool answered ${answer.status}; try again`);
    return document;
  };

  // Some wallets show the chain of the message, others refuse a message for another chain than theirs.
  const matchChain = async (provider, wanted) => {
    const current = Number(await provider.request({method: "eth_chainId"}));
    if (current === wanted) return;
    try {
      await provider.request({method: "wallet_switchEthereumChain", params: [{chainId: `0x${wanted.toString(16)}`}]});
    } catch {
      throw new Error(`the wallet is on chain ${current}, this pool uses chain ${wanted}; switch the wallet to chain ${wanted} and try again`);
    }
  };

  const reason = (error) => {
    if (error?.code === 4001) return "you declined in the wallet; nothing was signed";
    if (error?.code === -32002) return "the wallet already waits for your answer; open it";
    return String(error?.message || error).slice(0, 300);
  };

  const use = async (provider) => {
    if (busy || !form.reportValidity()) return;
    busy = true;
    say("Answer in your wallet.");
    try {
      const [address] = await provider.request({method: "eth_requestAccounts"});
      if (!address) throw new Error("the wallet named no account; unlock it and try again");
      const {message, chain_id} = await ask({address});
      if (!message.startsWith(`${location.host} wants you to sign in`) || !message.includes(`\nURI: ${location.origin}\n`))
        throw new Error("the message is for another site; nothing was signed");
      await matchChain(provider, chain_id);
      const bytes = new TextEncoder().encode(message);
      const hex = `0x${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
      form.elements.signature.value = await provider.request({method: "personal_sign", params: [hex, address]});
      form.elements.message.value = message;
      form.requestSubmit();
    } catch (error) {
      say(reason(error), true);
    } finally {
      busy = false;
    }
  };

  addEventListener("eip6963:announceProvider", (event) => add(event.detail.info, event.detail.provider));
  dispatchEvent(new Event("eip6963:requestProvider"));
  // Wallets from before EIP-6963 put one provider into the page.
  setTimeout(() => {
    if (!found.size && window.ethereum) add({uuid: "injected", name: "Wallet of this browser"}, window.ethereum);
    if (!found.size) say(`No wallet was found in this browser. Install one as an extension, or use the command line: ${root.dataset.manual}`);
  }, 800);
})();
