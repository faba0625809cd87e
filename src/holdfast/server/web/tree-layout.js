// Where the turns of all sessions stand in the drawing of the tree: a lane for each session, a box for each turn, as
// wide as its tokens are many. What a fork shares with its parent stands in the parent's lane alone.

export const LANE = 84;
export const BOX = 34;
const MARGIN = 16;
const NARROW = 46;
const WIDE = 210;
const GAP = 22;
const TOP = 34;

// What a turn brought: its input and its answer, without the history.
export function ownTokens(turn) {
  if (!turn.usage) return turn.heard;
  return Math.max(0, turn.usage.prompt_tokens - turn.usage.cached_tokens) + turn.usage.completion_tokens;
}

// `lanes`: {branch, y, boxes, stem}; a box: {branch, turn, number, x, y, width}; a stem leads from a parent's box.
export function layOut(branches) {
  const shown = branches.map((branch) => [...branch.history, ...(branch.speaking ? [branch.speaking] : [])]);
  const most = Math.max(1, ...shown.flat().map(ownTokens));
  const ends = new Map();
  let right = 0;
  const lanes = branches.map((branch, lane) => {
    const y = TOP + lane * LANE;
    const places = [];
    const boxes = [];
    let stem = null;
    shown[lane].forEach((turn, row) => {
      const above = sharedWith(branch, turn, row) ? ends.get(branch.parent)?.[row] : null;
      if (above) {
        places.push(above);
        stem = above;
        return;
      }
      const x = row === 0 ? MARGIN : places[row - 1].x + places[row - 1].width + GAP;
      const width = Math.round(NARROW + (WIDE * ownTokens(turn)) / most);
      const box = { branch, turn, number: row + 1, x, y, width };
      places.push(box);
      boxes.push(box);
      right = Math.max(right, x + width);
    });
    ends.set(branch, places);
    const start = stem ? stem.x + stem.width + GAP : MARGIN;
    right = Math.max(right, start + 260);
    return { branch, y, boxes, stem, start };
  });
  return { lanes, width: right + MARGIN, height: TOP + branches.length * LANE };
}

// What both branches have is drawn once, as long as the parent has it.
function sharedWith(branch, turn, row) {
  return row < branch.forkedAt && branch.parent?.history[row]?.id === turn.id;
}
