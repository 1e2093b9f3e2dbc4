package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/trivet-csi/trivet/release/image"
)

// source is the repository, and buildType names what its files and parameters mean: release.sh.
const (
	source    = "https://github.com/trivet-csi/trivet"
	buildType = source + "/blob/main/release/release.sh"
)

// statement is an in-toto statement (in-toto.io/Statement/v1) with SLSA provenance (slsa.dev/provenance/v1).
type statement struct {
	Type          string     `json:"_type"`
	Subject       []resource `json:"subject"`
	PredicateType string     `json:"predicateType"`
	Predicate     provenance `json:"predicate"`
}

type resource struct {
	Name   string            `json:"name,omitempty"`
	URI    string            `json:"uri,omitempty"`
	Digest map[string]string `json:"digest"`
}

type provenance struct {
	BuildDefinition struct {
		BuildType            string            `json:"buildType"`
		ExternalParameters   map[string]string `json:"externalParameters"`
		InternalParameters   map[string]string `json:"internalParameters"`
		ResolvedDependencies []resource        `json:"resolvedDependencies"`
	} `json:"buildDefinition"`
	RunDetails struct {
		Builder struct {
			ID string `json:"id"`
		} `json:"builder"`
	} `json:"runDetails"`
}

// writeProvenance prints the provenance statement of files.
func writeProvenance(args []string) error {
	flags := flag.NewFlagSet("provenance", flag.ExitOnError)
	version := flags.String("version", "", "version of the release")
	commit := flags.String("commit", "", "commit of the source")
	builder := flags.String("builder", "", "URI of the builder")
	pushed := flags.String("image", "", "NAME@sha256:DIGEST of the image, a further subject")
	_ = flags.Parse(args)

	s := statement{Type: "https://in-toto.io/Statement/v1", PredicateType: "https://slsa.dev/provenance/v1"}
	for _, path := range flags.Args() {
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(data)
		s.Subject = append(s.Subject, resource{Name: filepath.Base(path), Digest: map[string]string{"sha256": hex.EncodeToString(sum[:])}})
	}
	name, digest, found := strings.Cut(*pushed, "@sha256:")
	if !found {
		return fmt.Errorf("-image is %q, but must be NAME@sha256:DIGEST", *pushed)
	}
	s.Subject = append(s.Subject, resource{Name: name, Digest: map[string]string{"sha256": digest}})

	definition := &s.Predicate.BuildDefinition
	definition.BuildType = buildType
	definition.ExternalParameters = map[string]string{"repository": source, "version": *version}
	definition.InternalParameters = map[string]string{"go": runtime.Version()}
	definition.ResolvedDependencies = []resource{{URI: "git+" + source + "@" + *commit, Digest: map[string]string{"gitCommit": *commit}}}
	packages, err := image.Packages()
	if err != nil {
		return err
	}
	for _, p := range packages {
		definition.ResolvedDependencies = append(definition.ResolvedDependencies, resource{URI: p.URL, Digest: map[string]string{"sha256": p.SHA256}})
	}
	s.Predicate.RunDetails.Builder.ID = *builder
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	return out.Encode(s)
}

// printPredicate prints the predicate of a statement, from which cosign makes statements about images.
func printPredicate(args []string) error {
	if len(args) != 1 {
		return errors.New(usage)
	}
	data, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	var s struct {
		Predicate json.RawMessage `json:"predicate"`
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	_, err = os.Stdout.Write(s.Predicate)
	return err
}
