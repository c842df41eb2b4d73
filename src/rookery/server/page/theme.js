// The theme is set before the first paint: "dark" or "light" where the reader chose one, else the system's.
const theme = localStorage.getItem("rookery-theme");
if (theme) document.documentElement.dataset.theme = theme;
