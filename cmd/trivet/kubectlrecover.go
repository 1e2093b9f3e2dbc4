package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/move"
)

// recoverFlags are the flags of `kubectl trivet recover`.
type recoverFlags struct {
	move.Options
	copyName           string
	dryRun, abort, yes bool
}

func newRecoverCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "recover CLAIM",
		Short: "Give a claim whose node is lost the newest copy",
		Long: `Gives a PersistentVolumeClaim whose node is lost the newest copy that 'kubectl trivet
protect' has made. The claim keeps its name and its UID. What was written after the
snapshot of the copy is lost: the command prints the time and the age of the data, and
asks before it changes anything.

The command refuses unless the Node object of the old node does not exist, or the node is
not ready and has the taint node.kubernetes.io/out-of-service. With the taint or the
deletion you declare that the machine is off: the command cannot check it. The old volume
is never deleted: it stays in a PersistentVolume.

If the command is interrupted, run it again: it continues. --abort undoes it until the
claim has the copy.`,
		Example: `  # Show the copy and the age of its data.
  kubectl trivet recover -n shop data-db-0 --dry-run

  kubectl trivet recover -n shop data-db-0`,
		Args: cobra.ExactArgs(1),
	}
	var f recoverFlags
	flags := cmd.Flags()
	flags.StringVarP(&access.overrides.Context.Namespace, "namespace", "n", "", "`namespace` of the claim; default: that of the context")
	flags.StringVar(&f.copyName, "copy", "", "`name` of the copy; default: the newest one")
	flags.BoolVar(&f.dryRun, "dry-run", false, "print the plan, and change nothing")
	flags.BoolVarP(&f.yes, "yes", "y", false, "do not ask")
	flags.BoolVar(&f.abort, "abort", false, "undo a recovery that is not complete")
	flags.DurationVar(&f.Timeout, "timeout", 5*time.Minute, "`duration` of each wait for objects")
	cmd.MarkFlagsMutuallyExclusive("dry-run", "abort")
	cmd.MarkFlagsMutuallyExclusive("copy", "abort")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, stop := untilSignal()
		defer stop()
		return recoverClaim(ctx, cmd, access, f, args[0])
	}
	return cmd
}

// recoverClaim gives a claim a copy, or undoes this.
func recoverClaim(ctx context.Context, cmd *cobra.Command, access *clusterAccess, f recoverFlags, claim string) (err error) {
	c, err := access.connect()
	if err != nil {
		return err
	}
	w := cmd.OutOrStdout()
	f.Recover, f.ClaimName, f.Transfers, f.Progress = true, claim, kinds.Transfer, func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	if f.Namespace, err = access.claimNamespace(); err != nil {
		return err
	}
	m, err := move.New(ctx, c, f.Options)
	if err != nil {
		return err
	}
	if err := m.CheckCopy(f.copyName); err != nil {
		return err
	}
	begun := m.Begun() != ""
	switch {
	case f.abort:
		err = m.Abort(ctx)
	case f.dryRun && begun:
		f.Progress("Not complete: %s.", m.Begun())
		return nil
	case begun:
		err = m.Resume(ctx)
	default:
		err = startRecovery(ctx, cmd.InOrStdin(), c, m, f)
	}
	if err != nil && m.Begun() != "" {
		return fmt.Errorf("%w\n%s is not complete. To continue, run the same command again", interrupted(ctx, err), m.Begun())
	}
	return interrupted(ctx, err)
}

// startRecovery prints the plan of a recovery, asks, and then gives the claim the copy, unless this is a dry run.
func startRecovery(ctx context.Context, in io.Reader, c *kubectl.Cluster, m *move.Mover, f recoverFlags) error {
	report, err := c.Report(ctx)
	if err != nil {
		return err
	}
	r, err := m.PlanRecovery(ctx, report, f.copyName)
	if err != nil {
		return err
	}
	taken := r.Copy.Snapshotted.UTC().Format(time.RFC3339)
	f.Progress("Claim:      %s/%s", f.Namespace, f.ClaimName)
	f.Progress("Old volume: %s on node %s, which is lost", r.Volume.Spec.CSI.VolumeHandle, r.From)
	f.Progress("Copy:       %s on node %s", r.Copy.Claim, r.Copy.Node)
	f.Progress("Data of:    %s", taken)
	for _, n := range r.Newer {
		f.Progress("Newer, but not usable: %v.", n.Reason)
	}
	f.Progress("Everything that was written since %s, about %s, is lost.", taken, move.Age(r.Copy.Snapshotted))
	if f.dryRun {
		return nil
	}
	if !f.yes {
		if err := confirm(in, f.Progress); err != nil {
			return err
		}
	}
	if err := m.StartRecovery(ctx, r); err != nil {
		return err
	}
	f.Progress("Claim %s/%s has the data of %s on node %s.", f.Namespace, f.ClaimName, taken, r.Copy.Node)
	f.Progress("If the claim is protected, have the next copies on another node:")
	f.Progress("  kubectl trivet protect -n %s %s --on NODE --every PERIOD", f.Namespace, f.ClaimName)
	return nil
}

// confirm reads the answer of the user from in.
func confirm(in io.Reader, ask func(format string, args ...any)) error {
	ask("Continue? Type yes:")
	answer, err := bufio.NewReader(in).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if strings.TrimSpace(answer) != "yes" {
		return errors.New("not confirmed, nothing is changed: type yes, or use --yes")
	}
	return nil
}
