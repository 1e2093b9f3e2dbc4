// Package chart tests the Helm chart in deploy/chart, with the helm that tools/
// pins and without a cluster. What only a cluster can tell (objects that are there
// already, admission, an installation that works) is test/e2e's.
package chart
