"use strict";
window.fastgrpoSections = window.fastgrpoSections || [];
