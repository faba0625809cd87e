// The look that a person chose, before anything is drawn: so a page in dark never flashes in light.

const look = localStorage.getItem("holdfast-look");
if (look === "dark" || look === "light") document.documentElement.dataset.look = look;
