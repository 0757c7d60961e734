// Tells the operator's admin in which time zone it is looked at.
(() => {
  "use strict";
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (!zone) return;
  const isTold = () => document.cookie.split("; ").some((cookie) => cookie.startsWith("weir_zone="));
  const wasTold = isTold();
  document.cookie = `weir_zone=${zone}; path=/admin/; max-age=31536000; samesite=lax`;
  // Who came in by single sign-on has seen no page of ours that told it: this first one is in UTC. Only the admin's own
  // pages see the cookie, and where cookies are refused nobody does.
  if (location.pathname.startsWith("/admin/") && !wasTold && isTold()) location.replace(location.href);
})();
