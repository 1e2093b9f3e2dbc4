package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/doctor"
	"github.com/trivet-csi/trivet/driver"
)

// errChecksFailed makes the command exit with status 1. The output contains the reasons.
var errChecksFailed = errors.New("some checks failed: see the failures above")

// doctorOptions returns the options that no flag sets.
func doctorOptions() doctor.Options {
	return doctor.Options{
		Version: version, Kinds: kinds, Patience: patience,
		Examine: func(ctx context.Context, e doctor.Export, report func(doctor.Check)) error {
			return inChild(ctx, examineTask, e, report)
		},
		Pod: doctor.Pod{
			InCluster: os.Getenv("KUBERNETES_SERVICE_HOST") != "",
			Node:      os.Getenv("NODE_NAME"), Namespace: os.Getenv("POD_NAMESPACE"),
			Name: os.Getenv("POD_NAME"), UID: os.Getenv("POD_UID"),
		},
	}
}

func newDoctorCommand() *cobra.Command {
	o := doctorOptions()
	cmd := &cobra.Command{
		Use:     "doctor",
		GroupID: adminGroup,
		Short:   "Check what works on this node, with suggested fixes",
		Long: `Checks the node, the state directory, the pools, the driver and, in a pod of
Kubernetes, the objects of the cluster. The result of a check is ok, warning, failure
or skipped; the line below a problem suggests a fix. In the controller's pod it checks
the cluster instead of the node.

The checks of a node are the kernel, capabilities, programs and loop devices, the
configuration, and for each pool its directory or disks, access, quotas, space, volumes
and leftovers. The checks of an export are the server's name and address, Kerberos,
mounting, writing, owners, renaming, the server's clock, locks and the NFS client
identity. The checks in a pod are certificates, the kubelet's directory, mount
propagation, the registration and the startup taint of the node, the versions of the
sidecars, the CSIDriver and the StorageClasses.

It changes nothing, with two exceptions: it creates missing nodes /dev/loopN in a
container, and it creates and removes a directory .trivet-doctor.… on each export. With
--server and --export it checks only that export, which need not be in the
configuration.

The exit status is 1 if a check failed. If a disk or the kubelet's directory does not
answer within 20 seconds, or an export within a minute, that is a failure, and the
other checks still run.`,
		Example: `  # Check this node with the configuration of its driver.
  trivet doctor

  # Test an NFS export before you use it.
  trivet doctor --server nas.lan --export /tank/volumes

  # Print the names of the failed checks.
  trivet doctor -o json | jq -r '.[] | select(.result == "failure") | .name'`,
	}
	config, stateDir, endpoint := configFlag(cmd), stateDirFlag(cmd), endpointFlag(cmd)
	cmd.Flags().StringVar(&o.DriverName, "driver-name", os.Getenv(driverNameVariable), "expected `name` of the driver (default: $"+driverNameVariable+"); if empty, the name that the driver reports, or "+driver.DefaultName+" if no driver answers")
	export := exportFlags(cmd)
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o.ConfigPath, o.ConfigOptional = *config, *config == defaultConfig
		o.StateDir, o.Endpoint = filepath.Clean(*stateDir), *endpoint
		bar := startProgress(cmd.ErrOrStderr())
		o.Begin = func(subject string) { bar.next("Checking %s", subject) }
		checks, err := runChecks(o, *export)
		bar.end()
		if err != nil {
			return err
		}
		if err := out.write(checks, checkTable(checks, out.isWide())); err != nil {
			return err
		}
		if doctor.Failed(checks) {
			return errChecksFailed
		}
		return nil
	}
	return cmd
}

// runChecks runs all checks of the configuration. If the flags name an export, it runs only the checks of
// that export.
func runChecks(o doctor.Options, e namedExport) ([]doctor.Check, error) {
	if !e.isSet() {
		return doctor.Run(context.Background(), o), nil
	}
	c, err := e.config()
	if err != nil {
		return nil, err
	}
	return doctor.ExportChecks(context.Background(), o, doctor.Export{Config: c, NoPool: true}), nil
}

// checkTable returns the table of checks. Remedies are in lines of their own, or in a column of the wide table.
func checkTable(checks []doctor.Check, wide bool) table {
	var lines []doctor.Check
	for _, c := range checks {
		lines = append(lines, c)
		if c.Remedy != "" && !wide {
			lines = append(lines, doctor.Check{Seen: "→ " + c.Remedy})
		}
	}
	return newTable(
		lines,
		column[doctor.Check]{name: "CHECK", cell: func(c doctor.Check) string { return c.Name }},
		column[doctor.Check]{name: "RESULT", cell: func(c doctor.Check) string { return string(c.Result) }, color: resultColor},
		column[doctor.Check]{name: "SEEN", cell: func(c doctor.Check) string { return c.Seen }},
		column[doctor.Check]{name: "REMEDY", wide: true, cell: func(c doctor.Check) string { return c.Remedy }},
	)
}

func resultColor(c doctor.Check) color {
	return map[doctor.Result]color{doctor.OK: green, doctor.Warning: yellow, doctor.Failure: red}[c.Result]
}
