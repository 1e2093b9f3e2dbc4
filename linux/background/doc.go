// Package background contains the budgets of tasks that may take long: copies, transfers, wipes, trims, checks. All tasks of this process
// on one disk share one budget, so that they do not delay the requests of others for the disk.
package background
