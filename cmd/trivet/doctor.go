package main

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"

	"github.com/trivet-csi/trivet/doctor"
	"github.com/trivet-csi/trivet/driver"
)

// errChecksFailed makes the command exit with status 1. The output contains the reasons.
var errChecksFailed = errors.New("some checks failed: see the failures above")

func runDoctor(args []string) error {
	flags := flag.NewFlagSet("trivet doctor", flag.ContinueOnError)
	config, stateDir, endpoint := configFlag(flags), stateDirFlag(flags), endpointFlag(flags)
	name := flags.String("driver-name", os.Getenv(driverNameVariable), "expected `name` of the driver (default: $"+driverNameVariable+"); if empty, the name that the driver reports, or "+driver.DefaultName+" if no driver answers")
	server, export := exportFlags(flags)
	format := outputFlag(flags, "table", "json")
	if err := parse(flags, args); err != nil {
		return err
	}
	o := doctor.Options{
		ConfigPath: *config, ConfigOptional: *config == defaultConfig,
		StateDir: filepath.Clean(*stateDir), Endpoint: *endpoint, DriverName: *name, Version: version, Kinds: kinds, Patience: patience,
		Examine: func(ctx context.Context, e doctor.Export, report func(doctor.Check)) error {
			return inChild(ctx, examineTask, e, report)
		},
		Pod: doctor.Pod{
			InCluster: os.Getenv("KUBERNETES_SERVICE_HOST") != "",
			Node:      os.Getenv("NODE_NAME"), Namespace: os.Getenv("POD_NAMESPACE"),
			Name: os.Getenv("POD_NAME"), UID: os.Getenv("POD_UID"),
		},
	}
	checks, err := runChecks(o, *server, *export)
	if err != nil {
		return err
	}
	rows := [][]string{{"CHECK", "RESULT", "SEEN"}}
	for _, c := range checks {
		rows = append(rows, []string{c.Name, string(c.Result), c.Seen})
		if c.Remedy != "" {
			rows = append(rows, []string{"", "", "→ " + c.Remedy})
		}
	}
	if err := write(os.Stdout, *format, checks, rows); err != nil {
		return err
	}
	if doctor.Failed(checks) {
		return errChecksFailed
	}
	return nil
}

// runChecks runs all checks of the configuration. If the flags name an export, it runs only the checks of
// that export.
func runChecks(o doctor.Options, server, export string) ([]doctor.Check, error) {
	if server == "" && export == "" {
		return doctor.Run(context.Background(), o), nil
	}
	c, err := exportConfig(server, export)
	if err != nil {
		return nil, err
	}
	return doctor.ExportChecks(context.Background(), o, doctor.Export{Config: c, NoPool: true}), nil
}
