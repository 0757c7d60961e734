// Follows the newest line until the reader scrolls up, and again once they come back to the end.

const NEAR_END_PX = 48;

export class Follower {
  #scroller;
  #button;
  #following = true;
  #lastTop = 0;

  constructor(scroller, button) {
    this.#scroller = scroller;
    this.#button = button;
    scroller.addEventListener("scroll", () => this.#onScroll(), { passive: true });
    button.addEventListener("click", () => {
      this.jump();
      scroller.focus({ preventScroll: true });
    });
    new ResizeObserver(() => this.follow()).observe(scroller);
  }

  /** Call after content grew. */
  follow() {
    if (this.#following) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#button.hidden = this.#following;
  }

  jump() {
    this.#following = true;
    this.follow();
  }

  #onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    const nearEnd = scrollHeight - clientHeight - scrollTop < NEAR_END_PX;
    // Only a move upwards is a wish to stay: growing content also leaves us away from the end for a moment.
    if (nearEnd) this.#following = true;
    else if (scrollTop < this.#lastTop) this.#following = false;
    this.#lastTop = scrollTop;
    this.#button.hidden = this.#following;
  }
}
