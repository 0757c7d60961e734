// In place of the theme's file, 200 kB of Chart.js: no page of the admin draws a chart with it.
