package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/volume"
)

// topOutput is the output of `kubectl trivet top`.
type topOutput struct {
	// IntervalSeconds is the time between the two reports.
	IntervalSeconds float64              `json:"intervalSeconds"`
	Calls           []kubectl.CallRate   `json:"calls"`
	Volumes         []kubectl.VolumeRate `json:"volumes"`
}

func newTopCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the running calls and the I/O of volumes",
		Long: `Shows the calls of the drivers with their durations, and the I/O of the volumes that
have a device, during an interval. Directories and volumes on NFS have no device of
their own, so they are not shown.`,
		Example: `  kubectl trivet top

  # A new table every ten seconds, until you stop it.
  kubectl trivet top --watch --interval 10s`,
	}
	var interval time.Duration
	var watch bool
	cmd.Flags().DurationVar(&interval, "interval", 2*time.Second, "`duration` between the two reports that are compared; at least 1s")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "repeat until interrupted")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if interval < time.Second {
			return asUsageError(cmd, fmt.Errorf("--interval %s is too short: give at least 1s", interval))
		}
		ctx, stop := untilSignal()
		defer stop()
		err := showRates(ctx, access, out, interval, watch)
		if watch && errors.Is(err, context.Canceled) {
			return nil
		}
		return err
	}
	return cmd
}

// showRates writes the difference of two reports, once or until ctx ends.
func showRates(ctx context.Context, access *clusterAccess, out *output, interval time.Duration, repeat bool) error {
	c, before, err := access.report(ctx)
	for err == nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(interval):
		}
		after, reportErr := c.Report(ctx)
		if reportErr != nil {
			return reportErr
		}
		o := topOutput{after.Time.Sub(before.Time).Seconds(), kubectl.CallRates(before, after), kubectl.VolumeRates(before, after)}
		if err := out.write(o, callTable(o.Calls), rateTable(o.Volumes)); err != nil || !repeat {
			return err
		}
		before = after
	}
	return err
}

func callTable(all []kubectl.CallRate) table {
	return newTable(
		all,
		column[kubectl.CallRate]{name: "DRIVER", cell: func(c kubectl.CallRate) string { return cmp.Or(c.Node, "controller") }},
		column[kubectl.CallRate]{name: "CALL", cell: func(c kubectl.CallRate) string { return c.Method }},
		column[kubectl.CallRate]{name: "RUNNING", cell: func(c kubectl.CallRate) string { return fmt.Sprint(c.Running) }},
		column[kubectl.CallRate]{name: "COMPLETED", cell: func(c kubectl.CallRate) string { return fmt.Sprint(c.Count) }},
		column[kubectl.CallRate]{name: "FAILED", cell: func(c kubectl.CallRate) string { return fmt.Sprint(c.Failed) }, color: func(c kubectl.CallRate) color { return goodIf(c.Failed == 0) }},
		column[kubectl.CallRate]{name: "MEAN", cell: func(c kubectl.CallRate) string {
			return time.Duration(c.MeanSeconds * float64(time.Second)).Round(10 * time.Microsecond).String()
		}},
	)
}

func rateTable(all []kubectl.VolumeRate) table {
	number := func(name string, of func(kubectl.VolumeRate) float64) column[kubectl.VolumeRate] {
		return column[kubectl.VolumeRate]{name: name, cell: func(v kubectl.VolumeRate) string { return fmt.Sprintf("%.0f", of(v)) }}
	}
	bytes := func(name string, of func(kubectl.VolumeRate) float64) column[kubectl.VolumeRate] {
		return column[kubectl.VolumeRate]{name: name, cell: func(v kubectl.VolumeRate) string { return volume.FormatSize(int64(of(v))) }}
	}
	return newTable(
		all,
		column[kubectl.VolumeRate]{name: "VOLUME", cell: func(v kubectl.VolumeRate) string { return v.Name }},
		column[kubectl.VolumeRate]{name: "NODE", cell: func(v kubectl.VolumeRate) string { return cmp.Or(v.Node, "-") }},
		number("READS/S", func(v kubectl.VolumeRate) float64 { return v.Reads }),
		bytes("READ/S", func(v kubectl.VolumeRate) float64 { return v.ReadBytes }),
		number("WRITES/S", func(v kubectl.VolumeRate) float64 { return v.Writes }),
		bytes("WRITTEN/S", func(v kubectl.VolumeRate) float64 { return v.WrittenBytes }),
		number("BUSY%", func(v kubectl.VolumeRate) float64 { return v.BusyPercent }),
	)
}
