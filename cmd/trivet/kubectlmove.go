package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/move"
	"github.com/trivet-csi/trivet/volume"
)

// moveFlags are the flags of `kubectl trivet move`.
type moveFlags struct {
	move.Options
	dryRun, abort bool
}

func newMoveCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "move CLAIM --to NODE",
		Short: "Move the volume of a claim to another node",
		Long: `Moves the volume of a PersistentVolumeClaim from its node to another node. The claim
keeps its name and its UID. The pods that use it are stopped for a short time: most of
the data is copied while they run. A volume without snapshots is copied while they are
stopped.

The command prints its plan, and refuses a claim that cannot be moved before it changes
anything. If it is interrupted, run it again: it continues where it was. --abort undoes
a move until the claim has the new volume. The old volume is deleted when a pod runs
with the new one.`,
		Example: `  # Show what would be done.
  kubectl trivet move -n shop data-db-0 --to worker-2 --dry-run

  kubectl trivet move -n shop data-db-0 --to worker-2
  kubectl trivet move -n shop data-db-0 --abort`,
		Args: cobra.ExactArgs(1),
	}
	var f moveFlags
	flags := cmd.Flags()
	flags.StringVar(&f.To, "to", "", "`node` to which the volume is moved")
	must(cmd.RegisterFlagCompletionFunc("to", access.completeNodes))
	flags.StringVarP(&access.overrides.Context.Namespace, "namespace", "n", "", "`namespace` of the claim; default: that of the context")
	flags.StringVar(&f.SnapshotClass, "snapshot-class", "", "VolumeSnapshotClass of the snapshots, by `name`; default: the only one or the default one of the driver")
	flags.BoolVar(&f.dryRun, "dry-run", false, "print the plan, and change nothing")
	flags.BoolVar(&f.Keep, "keep", false, "keep the old volume, and print the command that deletes it")
	flags.BoolVar(&f.abort, "abort", false, "undo a move that is not complete")
	flags.DurationVar(&f.Timeout, "timeout", 5*time.Minute, "`duration` of each wait for pods and objects; the transfer has no limit")
	cmd.MarkFlagsOneRequired("to", "abort")
	cmd.MarkFlagsMutuallyExclusive("to", "abort")
	cmd.MarkFlagsMutuallyExclusive("dry-run", "abort")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, stop := untilSignal()
		defer stop()
		return moveClaim(ctx, cmd, access, f, args[0])
	}
	return cmd
}

// moveClaim moves the volume of a claim, or undoes a move.
func moveClaim(ctx context.Context, cmd *cobra.Command, access *clusterAccess, f moveFlags, claim string) (err error) {
	c, err := access.connect()
	if err != nil {
		return err
	}
	w := cmd.OutOrStdout()
	f.ClaimName, f.Transfers, f.Progress = claim, kinds.Transfer, func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	if f.Namespace, err = access.claimNamespace(); err != nil {
		return err
	}
	m, err := move.New(ctx, c, f.Options)
	if err != nil {
		return err
	}
	switch {
	case f.abort:
		err = m.Abort(ctx)
	case f.dryRun && m.Begun() != "":
		f.Progress("Not complete: %s.", m.Begun())
		return nil
	case m.Begun() != "":
		err = m.Resume(ctx)
	default:
		err = startMove(ctx, w, c, m, f)
	}
	if err != nil && m.Begun() != "" {
		err = fmt.Errorf("%w\n%s", interrupted(ctx, err), remedies(m, f))
	}
	return err
}

// interrupted returns an error that says that the user has interrupted the command, if so.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return errors.New("interrupted")
	}
	return err
}

// remedies returns the commands with which the user completes or undoes a move.
func remedies(m *move.Mover, f moveFlags) string {
	command := fmt.Sprintf("kubectl trivet move -n %s %s", f.Namespace, f.ClaimName)
	text := "The move is not complete."
	resume, abort := m.Next()
	if resume {
		text += fmt.Sprintf(" To continue: %s --to %s", command, m.Destination())
	}
	if abort {
		text += fmt.Sprintf("\nTo undo it: %s --abort", command)
	}
	return text
}

// startMove prints the plan of a move, and then moves the volume unless this is a dry run.
func startMove(ctx context.Context, w io.Writer, c *kubectl.Cluster, m *move.Mover, f moveFlags) error {
	report, err := c.Report(ctx)
	if err != nil {
		return err
	}
	p, err := m.Plan(ctx, report)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(w, planText(p, f)); err != nil || f.dryRun {
		return err
	}
	return m.Start(ctx, p)
}

// stoppedWhile describes what happens while the pods are stopped.
func stoppedWhile(p move.Plan) string {
	if !p.Single {
		return "the last changes are copied"
	}
	const rate = 100 << 20 // bytes per second
	bytes := p.SizeBytes
	if p.UsedBytes >= 0 {
		bytes = p.UsedBytes
	}
	takes := max((time.Duration(bytes/rate) * time.Second).Round(time.Minute), time.Minute)
	return fmt.Sprintf("everything is copied, about %s at 100 MiB/s", move.Period(takes))
}

// planText returns the plan of a move.
func planText(p move.Plan, f moveFlags) string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-15s "+format+"\n", append([]any{name + ":"}, args...)...)
	}
	line("Claim", "%s/%s", f.Namespace, f.ClaimName)
	line("Volume", "%s, %s", p.Volume.Spec.CSI.VolumeHandle, volume.FormatSize(p.SizeBytes))
	if p.UsedBytes >= 0 {
		line("To copy", "at most %s", volume.FormatSize(p.UsedBytes))
	}
	line("From", "node %s", p.From)
	line("To", "node %s", p.To)
	if p.NoSnapshots == "" {
		line("Snapshot class", "%s", p.SnapshotClass)
	}
	for _, pod := range p.Pods {
		line("Pod to stop", "%s of %s", pod.Name, pod.Controller)
	}
	switch {
	case len(p.Pods) == 0:
	case p.NoSnapshots != "":
		line("Stop", "while %s, because %s", stoppedWhile(p), p.NoSnapshots)
	case p.Single:
		line("Stop", "while %s, because node %s has no room for two copies", stoppedWhile(p), p.To)
	default:
		line("Stop", "while %s", stoppedWhile(p))
	}
	if p.Cordon {
		line("Cordon", "node %s, during the stop", p.From)
	}
	return b.String()
}
