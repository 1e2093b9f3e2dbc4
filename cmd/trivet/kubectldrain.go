package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/move"
	"github.com/trivet-csi/trivet/volume"
)

// drainFlags are the flags of `kubectl trivet drain`.
type drainFlags struct {
	move.Options
	dryRun, skip bool
}

func newDrainCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "drain NODE",
		Short: "Move all volumes of a node to other nodes",
		Long: `Cordons a node, and moves the volumes of all claims that are only on this node to other
nodes, one after the other, as 'kubectl trivet move' does. The node stays cordoned. Each
volume is moved to the node with the most room of those to which it can be moved.

If a claim cannot be moved, the command prints the reason and changes nothing. If it is
interrupted, run it again: it continues.`,
		Example: `  # Show what would be done.
  kubectl trivet drain worker-1 --dry-run

  kubectl trivet drain worker-1
  kubectl drain worker-1 --ignore-daemonsets`,
		Args: cobra.ExactArgs(1),
	}
	var f drainFlags
	flags := cmd.Flags()
	flags.StringVar(&f.To, "to", "", "`node` to which all volumes are moved; default: chosen for each")
	must(cmd.RegisterFlagCompletionFunc("to", access.completeNodes))
	flags.StringVar(&f.SnapshotClass, "snapshot-class", "", "VolumeSnapshotClass of the snapshots, by `name`; default: the only one or the default one of the driver")
	flags.BoolVar(&f.dryRun, "dry-run", false, "print the plan, and change nothing")
	flags.BoolVar(&f.skip, "skip-unmovable", false, "move the other volumes if some cannot be moved")
	flags.DurationVar(&f.Timeout, "timeout", 5*time.Minute, "`duration` of each wait for pods and objects; transfers have no limit")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, stop := untilSignal()
		defer stop()
		return drainNode(ctx, cmd.OutOrStdout(), access, f, args[0])
	}
	return cmd
}

// drainNode moves the volumes of a node to other nodes.
func drainNode(ctx context.Context, w io.Writer, access *clusterAccess, f drainFlags, node string) error {
	c, report, err := access.report(ctx)
	if err != nil {
		return err
	}
	f.StayCordoned = true
	f.Transfers, f.Progress = kinds.Transfer, func(format string, args ...any) { _, _ = fmt.Fprintf(w, "  "+format+"\n", args...) }
	d, err := move.PlanDrain(ctx, c, report, node, f.Options)
	if err != nil {
		return err
	}
	if err := writeTables(w, []table{moveTable(d.Moves), unmovableTable(d.Unmovable)}, false, hasColors(w)); err != nil {
		return err
	}
	if len(d.Copies) > 0 {
		_, _ = fmt.Fprintf(w, "Not moved, because they are copies of protected claims: %s\n", strings.Join(d.Copies, ", "))
	}
	if len(d.Unmovable) > 0 && !f.skip {
		return fmt.Errorf("%d claims of node %s cannot be moved: remove the reasons, or use --skip-unmovable", len(d.Unmovable), node)
	}
	if f.dryRun {
		return nil
	}
	if err := c.Cordon(ctx, node, true); err != nil {
		return err
	}
	for _, m := range d.Moves {
		_, _ = fmt.Fprintf(w, "Claim %s:\n", m.Name())
		if err := m.Move(ctx); err != nil {
			return fmt.Errorf("claim %s: %w\nThe drain is not complete. To continue, run the same command again", m.Name(), interrupted(ctx, err))
		}
	}
	return checkDrained(ctx, c, f, node)
}

// checkDrained returns an error if the node has volumes of claims that were created during the drain.
func checkDrained(ctx context.Context, c *kubectl.Cluster, f drainFlags, node string) error {
	report, err := c.Report(ctx)
	if err != nil {
		return err
	}
	d, err := move.PlanDrain(ctx, c, report, node, f.Options)
	if err != nil {
		return err
	}
	left := len(d.Moves)
	if !f.skip {
		left += len(d.Unmovable)
	}
	if left > 0 {
		return fmt.Errorf("node %s has volumes of %d other claims now: run the same command again", node, left)
	}
	return nil
}

func moveTable(all []move.PlannedMove) table {
	return newTable(
		all,
		column[move.PlannedMove]{name: "CLAIM", cell: move.PlannedMove.Name},
		column[move.PlannedMove]{name: "SIZE", cell: func(m move.PlannedMove) string {
			if m.Begun() != "" {
				return "-"
			}
			return volume.FormatSize(m.Plan.SizeBytes)
		}},
		column[move.PlannedMove]{name: "TO", cell: func(m move.PlannedMove) string {
			if m.Begun() != "" {
				return m.Destination()
			}
			return m.Plan.To
		}},
		column[move.PlannedMove]{name: "PODS TO STOP", cell: func(m move.PlannedMove) string {
			var names []string
			for _, p := range m.Plan.Pods {
				names = append(names, p.Name)
			}
			if len(names) == 0 {
				return "-"
			}
			return strings.Join(names, ",")
		}},
		column[move.PlannedMove]{name: "STOPPED WHILE", cell: func(m move.PlannedMove) string {
			if len(m.Plan.Pods) == 0 {
				return "-"
			}
			return stoppedWhile(m.Plan)
		}},
	)
}

func unmovableTable(all []move.Unmovable) table {
	return newTable(
		all,
		column[move.Unmovable]{name: "CLAIM", cell: func(u move.Unmovable) string { return u.Claim }},
		column[move.Unmovable]{name: "CANNOT BE MOVED", cell: func(u move.Unmovable) string { return u.Reason.Error() }},
	)
}
