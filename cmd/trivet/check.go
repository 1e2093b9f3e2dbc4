package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/driver"
)

// errNotClean makes the command exit with status 1. The output contains the reason.
var errNotClean = errors.New("some volumes are damaged or were not checked: see above")

func newCheckCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "check VOLUME...",
		GroupID: adminGroup,
		Short:   "Check the filesystems of volumes while they are in use",
		Long: `Requests the driver of this node to check the filesystems of volumes with e2fsck,
xfs_repair or btrfs, which also verifies the checksums of its data. The driver
checks a temporary snapshot of each volume, so the volume can be used meanwhile and is
not changed. The snapshot needs room in the pool. The check program has the idle I/O
priority and is stopped at least half of the time while others use the disk.

The arguments are IDs of volumes ('trivet volumes'). The command returns when all
volumes are checked. Images can be checked if their pool is on xfs or btrfs, and
logical volumes if they are in a thin pool.

The exit status is 1 if a volume is damaged or was not checked.`,
		Example:           "  trivet check loop:default.2f6e1c0a:pvc-8f14e45f",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	endpoint := endpointFlag(cmd)
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		results, err := requestDriver(cmd.Context(), *endpoint, driver.CheckRequest{Volumes: args}, driver.Check)
		if err != nil {
			return err
		}
		return writeChecks(out, results)
	}
	return cmd
}

// writeChecks prints the results of checks.
func writeChecks(out *output, results []driver.CheckResult) error {
	damaged := slices.DeleteFunc(slices.Clone(results), func(r driver.CheckResult) bool { return r.Errors == "" })
	tables := []table{volumeCheckTable(results)}
	if len(damaged) > 0 {
		tables = append(tables, checkErrorTable(damaged))
	}
	if err := out.write(results, tables...); err != nil {
		return err
	}
	if slices.ContainsFunc(results, func(r driver.CheckResult) bool { return r.Result != driver.CheckClean }) {
		return errNotClean
	}
	return nil
}

func volumeCheckTable(results []driver.CheckResult) table {
	return newTable(
		results,
		column[driver.CheckResult]{name: "POOL", cell: func(r driver.CheckResult) string { return cmp.Or(r.Pool, "-") }},
		column[driver.CheckResult]{name: "VOLUME", cell: func(r driver.CheckResult) string { return cmp.Or(r.Name, r.ID) }},
		column[driver.CheckResult]{name: "RESULT", cell: func(r driver.CheckResult) string { return r.Result }, color: func(r driver.CheckResult) color { return goodIf(r.Result == driver.CheckClean) }},
		column[driver.CheckResult]{name: "STATE OF", wide: true, cell: func(r driver.CheckResult) string { return r.Began.Format(time.DateTime) }},
		column[driver.CheckResult]{name: "TIME", cell: func(r driver.CheckResult) string {
			return time.Duration(r.Seconds * float64(time.Second)).Round(100 * time.Millisecond).String()
		}},
		column[driver.CheckResult]{name: "BEFORE", cell: func(r driver.CheckResult) string {
			if r.LastCheck.IsZero() {
				return "-"
			}
			return fmt.Sprintf("%s, %s", r.LastResult, r.LastCheck.Format(time.DateTime))
		}},
		column[driver.CheckResult]{name: "PROBLEM", cell: func(r driver.CheckResult) string { return cmp.Or(r.Problem, "-") }, color: func(r driver.CheckResult) color { return goodIf(r.Problem == "") }},
	)
}

// checkLine is a line of the output of a check program.
type checkLine struct{ volume, text string }

func checkErrorTable(damaged []driver.CheckResult) table {
	var lines []checkLine
	for _, r := range damaged {
		for text := range strings.Lines(r.Errors) {
			lines = append(lines, checkLine{cmp.Or(r.Name, r.ID), strings.TrimRight(text, "\n")})
		}
	}
	return newTable(
		lines,
		column[checkLine]{name: "VOLUME", cell: func(l checkLine) string { return l.volume }},
		column[checkLine]{name: "ERRORS", cell: func(l checkLine) string { return l.text }},
	)
}

func newClusterCheckCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check CLAIM",
		Short: "Check the filesystem of a volume while it is in use",
		Long: `Runs 'trivet check' in the pod of the driver that has the volume of a claim. It returns
when the volume is checked. A check continues if the command is interrupted.

The command needs the right to create pods/exec in the namespace of the drivers. The
exit status is 1 if the volume is damaged or was not checked.`,
		Example: "  kubectl trivet check data-web-0 -n shop",
		Args:    cobra.ExactArgs(1),
	}
	cmd.Flags().StringVarP(&access.overrides.Context.Namespace, "namespace", "n", "", "`namespace` of the claim; default: that of the context")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, node, err := access.volumeOfClaim(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		if node == "" {
			return fmt.Errorf("claim %s: its volume is on an export: check the filesystem of the export on its server", args[0])
		}
		c, pods, err := access.pods(cmd.Context(), node)
		if err != nil {
			return err
		}
		results, err := runInPods[driver.CheckResult](cmd.Context(), c, pods, []string{"check", id})
		if err != nil {
			return err
		}
		return writeChecks(out, results)
	}
	return cmd
}
